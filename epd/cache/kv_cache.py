"""The KV tensor of one replica, and its block-major layout.

Owns the memory; knows nothing of which request holds which block (``epd.cache.block_pool``).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from epd.types import KVSpec


@dataclass(frozen=True, slots=True)
class KVCache:
    """KV blocks as one tensor ``[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]``.

    Block-major, so that a block with all its layers is one contiguous range: one transfer descriptor. ``pages`` is the
    same memory with one block more at its end, id ``num_blocks``: scratch, which no sequence holds and no transfer
    sees, for the rows that pad a batch.
    """

    blocks: torch.Tensor
    pages: torch.Tensor
    spec: KVSpec
    block_size: int
    layout: str
    """Fingerprint of everything two replicas must agree on before they exchange blocks."""

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[0]

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.spec.bytes_per_token


def allocate_kv_cache(
    spec: KVSpec, *, block_size: int, num_blocks: int, model_fingerprint: str, device: str = "cpu"
) -> KVCache:
    """Allocate zeroed blocks, and the scratch block. ``model_fingerprint`` enters ``layout`` with every dimension.

    Every page is written here: left to the first transfer, page faults would stall it for hundreds of milliseconds.
    """
    shape = (num_blocks + 1, spec.num_layers, 2, block_size, spec.num_kv_heads, spec.head_dim)
    pages = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=device).zero_()
    described = f"kv/1|{model_fingerprint}|{spec}|{block_size}"
    return KVCache(pages[:num_blocks], pages, spec, block_size, hashlib.sha256(described.encode()).hexdigest()[:16])
