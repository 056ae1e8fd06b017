"""Attention over block tables with the FlashAttention that torch ships, for a whole packed step in one call.

``VarlenLayers`` stands where ``epd.engine.attention.PagedLayers`` does on other devices. Knows nothing of requests.

How the pool suits the kernel: it takes K and V as pages ``[num_pages, page_size, num_kv_heads, head_dim]`` whose
strides are free but for the last, which must be 1. ``pages[:, layer, 0]`` of the block-major pool is such a tensor, its
page stride being that of a block with all its layers: K and V are read in place, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from epd.config import CUDA_BLOCK_SIZE
from epd.types import KVSpec

_MAX_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8
_CAUSAL, _ALL = (-1, 0), (-1, -1)


class VarlenKernel(Protocol):
    """The part of ``torch.nn.attention.varlen.varlen_attn``'s signature that is used here."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: torch.Tensor | None,
        block_table: torch.Tensor | None,
        num_splits: int | None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class VarlenBatch:
    """The attention side of one step: the arrays of ``epd.engine.cuda.inputs`` on the device, and two bounds.

    ``max_q`` bounds the new tokens of a sequence, and ``max_k`` its context.
    """

    slot_blocks: torch.Tensor
    slot_offsets: torch.Tensor
    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor
    context_lens: torch.Tensor
    tables: torch.Tensor
    max_q: int
    max_k: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], *, max_q: int, max_k: int) -> Self:
        names = ("slot_blocks", "slot_offsets", "cu_seq_q", "cu_seq_k", "context_lens", "tables")
        return cls(**{name: tensors[name] for name in names}, max_q=max_q, max_k=max_k)


class VarlenLayers:
    """The KV cache of one step as decoder layers see it: it takes K and V, and attends."""

    def __init__(self, pages: torch.Tensor, batch: VarlenBatch, kernel: VarlenKernel) -> None:
        self._pages = pages
        self._batch = batch
        self._kernel = kernel

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[1, num_kv_heads, num_tokens, head_dim]`` to the slots of this step; return the arguments."""
        index = (self._batch.slot_blocks, self._batch.slot_offsets)
        self._pages[:, layer_idx, 0].index_put_(index, key[0].transpose(0, 1))
        self._pages[:, layer_idx, 1].index_put_(index, value[0].transpose(0, 1))
        return key, value

    def attend(self, layer_idx: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return ``[num_tokens, num_heads, head_dim]`` for a query ``[num_heads, num_tokens, head_dim]``."""
        batch = self._batch
        key, value = self._pages[:, layer_idx, 0], self._pages[:, layer_idx, 1]
        is_grouped = query.shape[0] != key.shape[2]
        is_decode = batch.max_q == 1
        # Over pages, FlashAttention 2 may split a long context over thread blocks only where it folds the query heads
        # of a group into rows; it does so for single tokens attending without a mask, which one that ends its context
        # does not need. Elsewhere it writes the split results to wrong rows (pytorch/pytorch#194167).
        may_split = is_decode and is_grouped
        return self._kernel(
            query.transpose(0, 1),
            key,
            value,
            batch.cu_seq_q,
            batch.cu_seq_k,
            batch.max_q,
            batch.max_k,
            scale=scaling,
            window_size=_ALL if is_decode else _CAUSAL,
            enable_gqa=is_grouped,
            seqused_k=batch.context_lens,
            block_table=batch.tables,
            num_splits=None if may_split else 1,
        )


def torch_kernel() -> VarlenKernel:
    """Return torch's ``varlen_attn``."""
    from torch.nn.attention.varlen import varlen_attn

    kernel: VarlenKernel = varlen_attn  # type: ignore[assignment]  # without return_aux it returns one tensor
    return kernel


def why_unsuited(spec: KVSpec, block_size: int, device: str) -> str | None:
    """Say why FlashAttention 2 cannot serve this model on this device; ``None`` if it can."""
    if spec.dtype not in ("float16", "bfloat16"):
        return f"it has no {spec.dtype}"
    if block_size % CUDA_BLOCK_SIZE:
        return f"it reads blocks of a multiple of {CUDA_BLOCK_SIZE} tokens, not of {block_size}"
    if spec.head_dim % _HEAD_DIM_MULTIPLE or spec.head_dim > _MAX_HEAD_DIM:
        return f"it has no heads of {spec.head_dim} numbers"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than Ampere"
    return None
