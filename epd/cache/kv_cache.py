"""The KV tensor of one replica, and its block-major layout.

Owns the memory; knows nothing of which request holds which block (``epd.cache.block_pool``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from epd import __version__
from epd.cache.huge_pages import allocate_host
from epd.types import KVSpec

_SEPARATOR = ", "


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
    """All that two replicas must agree on before they exchange blocks: ``name=value`` pairs, for machines to compare
    whole and for people to read."""

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

    On the CPU in huge pages, if the kernel has them.
    """
    shape = (num_blocks + 1, spec.num_layers, 2, block_size, spec.num_kv_heads, spec.head_dim)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if torch.device(device).type == "cpu":
        pages = allocate_host(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    else:
        pages = torch.zeros(shape, dtype=dtype, device=device)
    layout = {
        "model": model_fingerprint,
        "dtype": spec.dtype,
        "block_size": block_size,
        "num_layers": spec.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "version": __version__,
    }
    described = _SEPARATOR.join(f"{name}={value}" for name, value in layout.items())
    return KVCache(pages[:num_blocks], pages, spec, block_size, described)


def differing_parts(theirs: str, ours: str) -> tuple[str, str]:
    """Return what is left of two layouts without the parts that they have in common, or all of both."""
    their_parts, our_parts = theirs.split(_SEPARATOR), ours.split(_SEPARATOR)
    if len(their_parts) != len(our_parts):
        return theirs, ours
    pairs = [(a, b) for a, b in zip(their_parts, our_parts, strict=True) if a != b]
    return _SEPARATOR.join(a for a, _ in pairs), _SEPARATOR.join(b for _, b in pairs)
