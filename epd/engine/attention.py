"""Paged attention: what a step's batch looks like, writing K and V to their slots, and attending over block tables.

Registered with transformers' ``AttentionInterface``, so decoder layers run unchanged: a layer hands its new keys and
values to ``PagedLayers.update`` (its "cache") and then calls ``paged_attention`` with the keyword ``paged``. Layers
that run as one kernel (``epd.engine.fused``) take ``PagedLayers.native_step`` instead. Knows nothing of requests or
sampling.

A step is a packed batch of sequences, each with a number of new tokens: one for a decode, many for a prefill chunk.
Decodes come first and are attended together; chunks follow, one by one. Paging after vLLM's PagedAttention (Kwon et
al., SOSP 2023); the packed mixed batch after Sarathi-Serve (Agrawal et al., OSDI 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from epd.cache.kv_cache import KVCache
from epd.engine.native import Kernels, NativeStep

ATTENTION = "epd_paged"
"""Name of the attention implementation in transformers' registry."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence's new tokens ``[first_row, first_row + num_tokens)`` of the batch, ending a context of
    ``context_len`` tokens (the new ones included) that lies in ``block_table``, int64 ``[num_blocks]``."""

    first_row: int
    num_tokens: int
    context_len: int
    block_table: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The attention side of one step.

    ``slot_blocks`` and ``slot_offsets``, int64 ``[num_tokens]``, say where each new token's K and V go. Rows
    ``[0, num_decodes)`` are decodes: ``decode_tables`` int64 ``[num_decodes, max_blocks]`` (padded with block 0) and
    ``decode_lens`` int64 ``[num_decodes]``, the tokens of context, the new one included.
    """

    slot_blocks: torch.Tensor
    slot_offsets: torch.Tensor
    num_decodes: int
    decode_tables: torch.Tensor
    decode_lens: torch.Tensor
    chunks: tuple[PrefillChunk, ...]


class PagedLayers:
    """The KV cache of one step as decoder layers see it: it takes K and V, and attends.

    ``kernels`` are ours for the CPU; without them torch's are used, on any device.
    """

    def __init__(self, kv_cache: KVCache, batch: AttentionBatch, kernels: Kernels | None = None) -> None:
        self._kv_cache = kv_cache
        self._batch = batch
        can_attend = kernels is not None and kernels.can_attend(kv_cache.spec.head_dim)
        self._kernels = kernels if can_attend else None
        self._step: NativeStep | None = None
        self._decode_mask: torch.Tensor | None = None
        self._chunk_masks: dict[int, torch.Tensor] = {}

    def native_step(self) -> NativeStep | None:
        """The step for kernels that do all of a layer, cache and attention included; ``None`` where there are none."""
        if self._step is None and self._kernels is not None:
            batch = self._batch
            slots, decodes = (batch.slot_blocks, batch.slot_offsets), (batch.decode_tables, batch.decode_lens)
            chunks = [(c.first_row, c.num_tokens, c.context_len, c.block_table) for c in batch.chunks]
            self._step = self._kernels.plan_step(self._kv_cache, slots, decodes, chunks)
        return self._step

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[1, num_kv_heads, num_tokens, head_dim]`` to the slots of this step; return the arguments."""
        layer = self._kv_cache.blocks[:, layer_idx]
        index = (self._batch.slot_blocks, self._batch.slot_offsets)
        layer[:, 0].index_put_(index, key[0].transpose(0, 1))
        layer[:, 1].index_put_(index, value[0].transpose(0, 1))
        return key, value

    def attend(self, layer_idx: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return ``[num_tokens, num_heads, head_dim]`` for a query ``[num_heads, num_tokens, head_dim]``."""
        batch = self._batch
        step = self.native_step()
        if step is not None:
            rows = query.transpose(0, 1).contiguous()
            return step.kernels.attend(rows, step, layer_idx, self._kv_cache.spec.num_kv_heads, scaling)
        layer = self._kv_cache.blocks[:, layer_idx]
        parts = []
        if batch.num_decodes:
            decodes = query[:, : batch.num_decodes].transpose(0, 1).contiguous()
            parts.append(self._attend_decodes(layer, decodes, scaling))
        parts.extend(self._attend_chunk(layer, query, chunk, scaling) for chunk in batch.chunks)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_decodes(self, layer: torch.Tensor, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """One new token a sequence, ``[num_seqs, num_heads, head_dim]``, with torch's own kernels.

        Whole blocks are gathered. The query heads of a group share K and V, so they are folded into the query length:
        no K or V is repeated.
        """
        tables = self._batch.decode_tables
        num_seqs, max_blocks = tables.shape
        _, num_heads, head_dim = query.shape
        block_size, num_kv_heads = layer.shape[2], layer.shape[3]
        gathered = layer.index_select(0, tables.view(-1)).view(
            num_seqs, max_blocks, 2, block_size, num_kv_heads, head_dim
        )
        key, value = (
            gathered[:, :, side].reshape(num_seqs, max_blocks * block_size, num_kv_heads, head_dim).transpose(1, 2)
            for side in (0, 1)
        )
        if self._decode_mask is None:
            context = torch.arange(max_blocks * block_size, device=tables.device)
            self._decode_mask = (context[None] < self._batch.decode_lens[:, None])[:, None, None]
        grouped = query.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=self._decode_mask, scale=scaling)
        return out.reshape(num_seqs, num_heads, head_dim)

    def _attend_chunk(
        self, layer: torch.Tensor, query: torch.Tensor, chunk: PrefillChunk, scaling: float
    ) -> torch.Tensor:
        rows = query[None, :, chunk.first_row : chunk.first_row + chunk.num_tokens]
        gathered = layer.index_select(0, chunk.block_table)
        key, value = (gathered[:, side].flatten(0, 1)[: chunk.context_len].transpose(0, 1)[None] for side in (0, 1))
        num_computed = chunk.context_len - chunk.num_tokens
        if num_computed == 0:
            out = F.scaled_dot_product_attention(rows, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        else:
            mask = self._chunk_masks.get(chunk.first_row)
            if mask is None:
                mask = torch.ones(chunk.num_tokens, chunk.context_len, dtype=torch.bool, device=query.device)
                self._chunk_masks[chunk.first_row] = mask.tril_(num_computed)
            out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
        return out[0].transpose(0, 1)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedLayers,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for one decoder layer; the function that transformers' layers call.

    ``query`` is ``[1, num_heads, num_tokens, head_dim]``; ``key`` and ``value`` were already written by
    ``PagedLayers.update`` and are not looked at. Returns ``[1, num_tokens, num_heads, head_dim]``.
    """
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    return paged.attend(layer_idx, query[0], scale)[None], None


def register_attention() -> None:
    """Make ``ATTENTION`` known to transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, paged_attention)


def build_decode_tables(
    block_tables: Sequence[Sequence[int]], context_lens: Sequence[int], block_size: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad block tables to a rectangle; return it with the lengths, as ``AttentionBatch`` wants them."""
    max_blocks = max((-(-length // block_size) for length in context_lens), default=0)
    padded = np.zeros((len(block_tables), max_blocks), dtype=np.int64)
    for row, (table, length) in enumerate(zip(block_tables, context_lens, strict=True)):
        num_blocks = -(-length // block_size)
        padded[row, :num_blocks] = table[:num_blocks]
    lengths = np.asarray(context_lens, dtype=np.int64)
    return torch.from_numpy(padded).to(device), torch.from_numpy(lengths).to(device)
