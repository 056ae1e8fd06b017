"""A step as arrays: what the model, the attention and the logits need to know, in the types that the kernel takes.

Pure arithmetic over sequences and their block tables; knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from epd.engine.cuda.staging import Array
from epd.engine.model_runner import rotary_positions, scheduled_ids
from epd.engine.sequence import EngineSequence


def step_arrays(
    num_tokens: Mapping[EngineSequence, int], logit_sequences: Sequence[EngineSequence], block_size: int
) -> dict[str, Array]:
    """Describe a step of any kind.

    ``ids`` int64 ``[total_tokens]`` and ``positions`` int64 ``[3, total_tokens]`` are the model's; ``slot_blocks`` and
    ``slot_offsets``, int64 ``[total_tokens]``, say where K and V go; the attention takes ``cu_seq_q`` and
    ``cu_seq_k``, int32 ``[num_seqs + 1]``, ``context_lens``, int32 ``[num_seqs]``, and ``tables``, int32
    ``[num_seqs, max_blocks]``; ``logit_rows``, int64, names the rows that logits are wanted of.
    """
    counts = np.fromiter(num_tokens.values(), dtype=np.int64, count=len(num_tokens))
    starts = np.array([sequence.num_computed_tokens for sequence in num_tokens], dtype=np.int64)
    lens = starts + counts
    tables = _tables([sequence.block_table for sequence in num_tokens], lens, block_size)
    ends = np.cumsum(counts)
    rows = np.repeat(np.arange(len(counts)), counts)
    indexes = np.arange(int(ends[-1])) - (ends - counts)[rows] + starts[rows]
    end_of = dict(zip(num_tokens, ends.tolist(), strict=True))
    return {
        "ids": scheduled_ids(num_tokens),
        "positions": rotary_positions(num_tokens),
        "slot_blocks": tables[rows, indexes // block_size].astype(np.int64),
        "slot_offsets": indexes % block_size,
        "cu_seq_q": _cumulative(counts),
        "cu_seq_k": _cumulative(lens),
        "context_lens": lens.astype(np.int32),
        "tables": tables,
        "logit_rows": np.array([end_of[sequence] - 1 for sequence in logit_sequences], dtype=np.int64),
    }


def decode_arrays(
    sequences: Sequence[EngineSequence], bucket: int, *, block_size: int, max_blocks: int, scratch_block: int
) -> dict[str, Array]:
    """Describe a step of single tokens, padded to ``bucket`` rows and tables of ``max_blocks``: same shapes every time.

    A padding row writes to the scratch block and reads the one token that it wrote, so nothing live is touched. Those
    of ``step_arrays``, less what follows from the bucket: every sequence has one row, and every row has logits.
    """
    padded = step_arrays(dict.fromkeys(sequences, 1), (), block_size)
    num_padding = bucket - len(sequences)
    tables = np.full((bucket, max_blocks), scratch_block, dtype=np.int32)
    tables[: len(sequences), : padded["tables"].shape[1]] = padded["tables"]
    tables[: len(sequences), padded["tables"].shape[1] :] = 0
    lens = np.pad(padded["context_lens"], (0, num_padding), constant_values=1)
    return {
        "ids": np.pad(padded["ids"], (0, num_padding)),
        "positions": np.pad(padded["positions"], ((0, 0), (0, num_padding))),
        "slot_blocks": np.pad(padded["slot_blocks"], (0, num_padding), constant_values=scratch_block),
        "slot_offsets": np.pad(padded["slot_offsets"], (0, num_padding)),
        "cu_seq_q": np.arange(bucket + 1, dtype=np.int32),
        "cu_seq_k": _cumulative(lens),
        "context_lens": lens,
        "tables": tables,
    }


def empty_decode_arrays(bucket: int, *, max_blocks: int, scratch_block: int) -> dict[str, Array]:
    """Describe a decode step of nothing but padding: what a graph is captured over."""
    return {
        "ids": np.zeros(bucket, dtype=np.int64),
        "positions": np.zeros((3, bucket), dtype=np.int64),
        "slot_blocks": np.full(bucket, scratch_block, dtype=np.int64),
        "slot_offsets": np.zeros(bucket, dtype=np.int64),
        "cu_seq_q": np.arange(bucket + 1, dtype=np.int32),
        "cu_seq_k": np.arange(bucket + 1, dtype=np.int32),
        "context_lens": np.ones(bucket, dtype=np.int32),
        "tables": np.full((bucket, max_blocks), scratch_block, dtype=np.int32),
    }


def _tables(tables: Sequence[Sequence[int]], lens: Array, block_size: int) -> Array:
    """Block tables as a rectangle, int32; what a table lacks is block 0, which the kernel does not look at."""
    padded = np.zeros((len(tables), -(-int(lens.max()) // block_size)), dtype=np.int32)
    for row, (table, length) in enumerate(zip(tables, lens.tolist(), strict=True)):
        num_blocks = -(-length // block_size)
        padded[row, :num_blocks] = table[:num_blocks]
    return padded


def _cumulative(counts: Array) -> Array:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
