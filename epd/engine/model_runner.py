"""Turns a scheduler's decision into tensors, runs the model once, and returns the logits of the rows that need them.

Owns the KV tensor's contents; consumes data and decides nothing. Knows nothing of queues, sampling or transfer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from epd.cache.kv_cache import KVCache
from epd.engine.attention import AttentionBatch, PagedLayers, PrefillChunk, build_decode_tables
from epd.engine.native import DecodeKernel
from epd.engine.sequence import EngineSequence
from epd.types import LanguageModel


class ModelRunner:
    """Runs packed steps of one language model over one KV cache, on one thread."""

    def __init__(
        self, model: LanguageModel, kv_cache: KVCache, device: str = "cpu", decode_kernel: DecodeKernel | None = None
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.device = device
        self._decode_kernel = decode_kernel

    @torch.inference_mode()
    def run(self, num_tokens: Mapping[EngineSequence, int], logit_sequences: Sequence[EngineSequence]) -> torch.Tensor:
        """Compute the scheduled tokens; return float32 logits ``[len(logit_sequences), vocab_size]``, each of the last
        scheduled token of that sequence. ``num_tokens`` lists single tokens first."""
        batch = self._attention_batch(num_tokens)
        hidden = self._embed(num_tokens)
        positions = torch.from_numpy(_rotary_positions(num_tokens)).to(self.device)
        layers = PagedLayers(self.kv_cache, batch, self._decode_kernel)
        hidden = self.model.forward(hidden, positions, layers, layers)
        if not logit_sequences:
            return torch.empty(0, self.model.vocab_size)
        ends = dict(zip(num_tokens, np.cumsum(list(num_tokens.values())).tolist(), strict=True))
        rows = torch.tensor([ends[sequence] - 1 for sequence in logit_sequences], device=self.device)
        return self.model.logits(hidden[rows]).to("cpu", torch.float32)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block with all its layers: what a forked sequence does with the last, partly filled block."""
        self.kv_cache.blocks[target].copy_(self.kv_cache.blocks[source])

    def _embed(self, num_tokens: Mapping[EngineSequence, int]) -> torch.Tensor:
        ids: list[int] = []
        for sequence, count in num_tokens.items():
            start = sequence.num_computed_tokens
            ids.extend(sequence.token_ids[start : start + count])
        hidden = self.model.embed(torch.tensor(ids, dtype=torch.int64, device=self.device))
        row = 0
        for sequence, count in num_tokens.items():
            if sequence.request.items:
                _put_embeddings(hidden[row : row + count], sequence, sequence.num_computed_tokens)
            row += count
        return hidden

    def _attention_batch(self, num_tokens: Mapping[EngineSequence, int]) -> AttentionBatch:
        block_size = self.kv_cache.block_size
        slots: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        blocks: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        decodes: list[EngineSequence] = []
        chunks: list[PrefillChunk] = []
        row = 0
        for sequence, count in num_tokens.items():
            start = sequence.num_computed_tokens
            token_indexes = np.arange(start, start + count)
            blocks.append(np.asarray(sequence.block_table, dtype=np.int64)[token_indexes // block_size])
            slots.append(token_indexes % block_size)
            if count == 1:
                decodes.append(sequence)
            else:
                num_blocks = -(-(start + count) // block_size)
                table = torch.tensor(sequence.block_table[:num_blocks], dtype=torch.int64, device=self.device)
                chunks.append(PrefillChunk(row, count, start + count, table))
            row += count
        tables, lens = build_decode_tables(
            [sequence.block_table for sequence in decodes],
            [sequence.num_computed_tokens + 1 for sequence in decodes],
            block_size,
            self.device,
        )
        return AttentionBatch(
            slot_blocks=torch.from_numpy(np.concatenate(blocks)).to(self.device),
            slot_offsets=torch.from_numpy(np.concatenate(slots)).to(self.device),
            num_decodes=len(decodes),
            decode_tables=tables,
            decode_lens=lens,
            chunks=tuple(chunks),
        )


def _rotary_positions(
    num_tokens: Mapping[EngineSequence, int],
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Positions ``[3, total_tokens]``: those of the prompt as the family laid them out, then index plus delta."""
    parts = []
    for sequence, count in num_tokens.items():
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
        rotary, num_prompt = sequence.state.rotary, sequence.request.num_prompt_tokens
        if start < num_prompt:
            parts.append(rotary.positions[:, start : min(end, num_prompt)])
        if end > num_prompt:
            after = np.arange(max(start, num_prompt), end, dtype=np.int64) + rotary.delta
            parts.append(np.broadcast_to(after, (3, len(after))))
    return np.concatenate(parts, axis=1)


def _put_embeddings(hidden: torch.Tensor, sequence: EngineSequence, start: int) -> None:
    """Overwrite placeholder rows of ``hidden`` (tokens from ``start`` on) with the media's embeddings."""
    end = start + hidden.shape[0]
    width = hidden.shape[1]
    for item, embedding in zip(sequence.request.items, sequence.state.embeddings, strict=True):
        first, last = max(start, item.placeholder.offset), min(end, item.placeholder.end)
        if first >= last:
            continue
        assert embedding is not None, "scheduled a token whose embedding is not here"
        rows = embedding.values[first - item.placeholder.offset : last - item.placeholder.offset, :width]
        hidden[first - start : last - start] = rows.to(hidden.dtype)
