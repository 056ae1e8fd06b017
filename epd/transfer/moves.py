"""Which bytes go where: block ids to address ranges, and ranges to reads. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Move", "Run", "batches", "block_runs", "plan_moves", "skip_bytes"]


@dataclass(frozen=True, slots=True)
class Run:
    """A contiguous range of memory."""

    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Move:
    """One contiguous range to read: from an address of the peer to one of ours."""

    remote_address: int
    local_address: int
    num_bytes: int


def block_runs(block_ids: Sequence[int], base_address: int, block_bytes: int) -> list[Run]:
    """Return the ranges of blocks, in the order given, adjacent ones merged."""
    runs: list[Run] = []
    for block_id in block_ids:
        address = base_address + block_id * block_bytes
        if runs and runs[-1].address + runs[-1].num_bytes == address:
            runs[-1] = Run(runs[-1].address, runs[-1].num_bytes + block_bytes)
        else:
            runs.append(Run(address, block_bytes))
    return runs


def skip_bytes(runs: Sequence[Run], num_bytes: int) -> Iterator[Run]:
    """Yield the runs without their first ``num_bytes``."""
    for run in runs:
        skipped = min(num_bytes, run.num_bytes)
        num_bytes -= skipped
        if skipped < run.num_bytes:
            yield Run(run.address + skipped, run.num_bytes - skipped)


def plan_moves(remote: Sequence[Run], local: Sequence[Run]) -> list[Move]:
    """Pair two lists of runs byte for byte, split wherever either side has a boundary.

    ``remote`` may be longer: what ``local`` has no room for is not read.
    """
    moves: list[Move] = []
    remaining = iter(remote)
    source = Run(0, 0)
    for run in local:
        done = 0
        while done < run.num_bytes:
            if source.num_bytes == 0:
                source = next(remaining)
            size = min(source.num_bytes, run.num_bytes - done)
            moves.append(Move(source.address, run.address + done, size))
            source = Run(source.address + size, source.num_bytes - size)
            done += size
    return moves


def batches(moves: Sequence[Move], max_bytes: int) -> Iterator[list[Move]]:
    """Yield the moves in batches of at most ``max_bytes``, cutting long ones."""
    batch: list[Move] = []
    room = max_bytes
    for move in moves:
        done = 0
        while done < move.num_bytes:
            size = min(room, move.num_bytes - done)
            batch.append(Move(move.remote_address + done, move.local_address + done, size))
            done += size
            room -= size
            if room == 0:
                yield batch
                batch, room = [], max_bytes
    if batch:
        yield batch
