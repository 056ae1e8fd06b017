"""Turns a scheduler's decision into tensors, runs the model once, and returns the logits of the rows that need them.

Owns the KV tensor's contents; consumes data and decides nothing. Knows nothing of queues, sampling or transfer.
``ModelRunner`` computes with torch's kernels on any device, and with ours on a CPU; ``epd.engine.cuda`` has the runner
for GPUs in half precision, and ``epd.engine.runners`` chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from epd.cache.kv_cache import KVCache
from epd.engine.attention import AttentionBatch, PagedLayers, PrefillChunk, build_decode_tables
from epd.engine.cuda.staging import Fence
from epd.engine.native import Kernels
from epd.engine.sequence import EngineSequence
from epd.types import LanguageModel


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What a step computed for the sequences that asked, on the host.

    ``values`` is float32 ``[num_rows, vocab_size]``, and has no rows where ``greedy_ids``, the most likely token of
    each row, were all that was wanted. It may be overwritten by the next step.
    """

    values: torch.Tensor
    greedy_ids: tuple[int, ...] | None = None


class PendingLogits(Protocol):
    """A step on its way. The device may still write to the step's blocks until ``wait`` returns."""

    def wait(self) -> StepLogits: ...


class Runner(Protocol):
    """Runs packed steps of one language model over one KV cache, on one thread."""

    def start(
        self, num_tokens: Mapping[EngineSequence, int], logit_sequences: Sequence[EngineSequence], is_greedy: bool
    ) -> PendingLogits:
        """Start computing the scheduled tokens, and the logits of the last one of each of ``logit_sequences``.

        ``num_tokens`` lists single tokens first. ``is_greedy`` promises that the most likely tokens are all that will
        be looked at. One step at a time: ``wait`` for it before the next.
        """
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block with all its layers: what a forked sequence does with the last, partly filled block."""
        ...

    def capture_graphs(self) -> int:
        """Record the steps that will be replayed, if this runner does that; return how many."""
        ...


@dataclass(frozen=True, slots=True)
class _Computed:
    """A step that was over when its call returned."""

    logits: StepLogits

    def wait(self) -> StepLogits:
        return self.logits


class ModelRunner:
    """The runner for CPUs, and for CUDA in float32, where it attends with torch's kernels over gathered blocks."""

    def __init__(
        self, model: LanguageModel, kv_cache: KVCache, device: str = "cpu", kernels: Kernels | None = None
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.device = device
        self._kernels = kernels
        self._end = Fence(device)

    def start(
        self, num_tokens: Mapping[EngineSequence, int], logit_sequences: Sequence[EngineSequence], is_greedy: bool
    ) -> PendingLogits:
        """See ``Runner``. The step is over when this returns, and its values are there in any case."""
        logits = self.run(num_tokens, logit_sequences)
        self._end.set()
        self._end.wait()  # on CUDA without logits, nothing else has waited for the step
        return _Computed(StepLogits(logits))

    def capture_graphs(self) -> int:
        """See ``Runner``. There are none."""
        return 0

    @torch.inference_mode()
    def run(self, num_tokens: Mapping[EngineSequence, int], logit_sequences: Sequence[EngineSequence]) -> torch.Tensor:
        """Compute the scheduled tokens; return float32 logits ``[len(logit_sequences), vocab_size]``, each of the last
        scheduled token of that sequence. ``num_tokens`` lists single tokens first."""
        batch = self._attention_batch(num_tokens)
        hidden = self._embed(num_tokens)
        positions = torch.from_numpy(rotary_positions(num_tokens)).to(self.device)
        layers = PagedLayers(self.kv_cache, batch, self._kernels)
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
        hidden = self.model.embed(torch.from_numpy(scheduled_ids(num_tokens)).to(self.device))
        put_all_embeddings(hidden, num_tokens)
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


def scheduled_ids(num_tokens: Mapping[EngineSequence, int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Ids of the tokens to compute, ``[total_tokens]``."""
    ids: list[int] = []
    for sequence, count in num_tokens.items():
        start = sequence.num_computed_tokens
        ids.extend(sequence.token_ids[start : start + count])
    return np.array(ids, dtype=np.int64)


def rotary_positions(
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


def put_all_embeddings(hidden: torch.Tensor, num_tokens: Mapping[EngineSequence, int]) -> None:
    """Overwrite the placeholder rows of a step's hidden states ``[total_tokens, hidden_size]``."""
    row = 0
    for sequence, count in num_tokens.items():
        if sequence.request.items:
            _put_embeddings(hidden[row : row + count], sequence, sequence.num_computed_tokens)
        row += count


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
