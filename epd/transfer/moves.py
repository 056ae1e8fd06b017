"""Which bytes go where: block ids to address ranges, and ranges to transfers. Pure arithmetic.

In arrays, because a long prompt has thousands of blocks: planning a thousand moves one by one takes as long as the
kernel takes to copy them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Move", "Moves", "Run", "Runs", "batches", "block_runs", "plan_moves", "skip_bytes"]


class Run(NamedTuple):
    """A contiguous range of memory: one row of ``Runs``."""

    address: int
    num_bytes: int


class Move(NamedTuple):
    """One contiguous range to read or write, between an address of the peer and one of ours: a row of ``Moves``."""

    remote_address: int
    local_address: int
    num_bytes: int


Runs: TypeAlias = npt.NDArray[np.int64]
"""``[num_runs, 2]``: address and number of bytes. (Addresses of user space fit into 63 bits.)"""

Moves: TypeAlias = npt.NDArray[np.int64]
"""``[num_moves, 3]``: address of the peer, address of ours, number of bytes."""


def block_runs(block_ids: Sequence[int], base_address: int, block_bytes: int) -> Runs:
    """Return the ranges of blocks, in the order given, adjacent ones merged."""
    ids = np.asarray(block_ids, dtype=np.int64)
    bounds = np.concatenate([[0], np.flatnonzero(ids[1:] != ids[:-1] + 1) + 1, [len(ids)]])
    starts = bounds[:-1] if len(ids) else bounds[:0]
    return _columns(base_address + ids[starts] * block_bytes, (bounds[1:] - bounds[:-1])[: len(starts)] * block_bytes)


def skip_bytes(runs: Runs, num_bytes: int) -> Runs:
    """Return the runs without their first ``num_bytes``."""
    ends = runs[:, 1].cumsum()
    is_kept = ends > num_bytes
    kept = runs[is_kept]
    if len(kept):
        skipped = num_bytes - (ends[is_kept][0] - kept[0, 1])
        kept[0] += (skipped, -skipped)
    return kept


def plan_moves(remote: Runs, local: Runs) -> Moves:
    """Pair two lists of runs byte for byte, split wherever either side has a boundary.

    ``remote`` may be longer: what ``local`` has no room for is not moved. Raises ``ValueError`` if it is shorter.
    """
    remote_ends, local_ends = remote[:, 1].cumsum(), local[:, 1].cumsum()
    num_bytes = int(local_ends[-1]) if len(local) else 0
    if num_bytes > (int(remote_ends[-1]) if len(remote) else 0):
        raise ValueError(f"the peer's side is shorter than {num_bytes} bytes")
    ends = np.unique(np.concatenate([remote_ends[remote_ends < num_bytes], local_ends]))
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    return _columns(_addresses(remote, remote_ends, starts), _addresses(local, local_ends, starts), ends - starts)


def batches(moves: Moves, max_bytes: int) -> Iterator[Moves]:
    """Yield the moves in batches of ``max_bytes``, the last one smaller, cutting moves where a batch is full."""
    ends = moves[:, 2].cumsum()
    num_bytes = int(ends[-1]) if len(ends) else 0
    for start in range(0, num_bytes, max_bytes):
        end = min(start + max_bytes, num_bytes)
        first, last = np.searchsorted(ends, start, side="right"), np.searchsorted(ends, end, side="left")
        batch = moves[first : last + 1].copy()
        batch[-1, 2] -= ends[last] - end
        skipped = start - (ends[first] - moves[first, 2])
        batch[0] += (skipped, skipped, -skipped)
        yield batch


def _addresses(runs: Runs, ends: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return where the bytes at ``offsets`` into the runs are."""
    at = np.searchsorted(ends, offsets, side="right")
    addresses: npt.NDArray[np.int64] = runs[at, 0] + offsets - (ends[at] - runs[at, 1])
    return addresses


def _columns(*columns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the columns side by side; ``np.stack`` takes four times as long for a few rows."""
    table = np.empty((len(columns[0]), len(columns)), dtype=np.int64)
    for index, column in enumerate(columns):
        table[:, index] = column
    return table
