"""Blocks and slots set aside for KV that is on its way from another replica.

Owns who waits for a reservation and who has one; the blocks come from the pool, the slots from the scheduler. Knows
nothing of transfers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from epd.cache.block_pool import BlockPool
from epd.engine.scheduler import Scheduler
from epd.engine.sequence import EngineSequence, RequestState
from epd.types import Request, RotaryPositions

_NO_POSITIONS = RotaryPositions(np.zeros((3, 0), dtype=np.int64), 0)


@dataclass(eq=False, slots=True)
class Reservation:
    """Blocks set aside for the KV of a request that was prefilled elsewhere.

    ``block_table`` covers ``num_tokens`` tokens; its first ``num_cached_blocks`` were found in the prefix cache and
    need no transfer. ``spare_blocks`` are for the partly filled last block of further choices.
    """

    request: Request
    num_tokens: int
    block_table: list[int]
    num_cached_blocks: int
    spare_blocks: list[int]
    num_seqs: int
    block_keys: list[bytes]

    @property
    def missing_blocks(self) -> list[int]:
        return self.block_table[self.num_cached_blocks :]


class Reservations:
    """First come, first served: a large wish at the head waits, and nothing small overtakes it for ever."""

    def __init__(self, pool: BlockPool, scheduler: Scheduler, block_size: int) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._block_size = block_size
        self._granted: dict[str, Reservation] = {}
        self._pending: deque[tuple[Request, int, Callable[[Reservation], None]]] = deque()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def request_ids(self) -> tuple[str, ...]:
        return (*self._granted, *(request.request_id for request, _, _ in self._pending))

    @property
    def block_lists(self) -> Iterator[list[int]]:
        return (reservation.block_table + reservation.spare_blocks for reservation in self._granted.values())

    def request(self, request: Request, num_tokens: int, on_ready: Callable[[Reservation], None]) -> None:
        """Ask for room for ``num_tokens`` tokens of KV; ``on_ready`` is called when it is there, perhaps at once."""
        self._pending.append((request, num_tokens, on_ready))
        self.serve()

    def serve(self) -> None:
        """Grant what waits while blocks and slots last."""
        while self._pending:
            request, num_tokens, on_ready = self._pending[0]
            reservation = self._try_reserve(request, num_tokens)
            if reservation is None:
                return
            self._pending.popleft()
            self._granted[request.request_id] = reservation
            on_ready(reservation)

    def _try_reserve(self, request: Request, num_tokens: int) -> Reservation | None:
        num_seqs = request.sampling.n
        if self._scheduler.num_free_slots < num_seqs:
            return None
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        probe = EngineSequence(RequestState(request, _NO_POSITIONS, arrival=0), 0, tokens)
        cached = self._scheduler.cached_blocks(probe, num_tokens)
        num_spare = num_seqs - 1 if num_tokens % self._block_size else 0
        num_missing = -(-num_tokens // self._block_size) - len(cached)
        self._pool.acquire(cached)
        if not self._pool.can_allocate(num_missing + num_spare):
            self._pool.release(cached)
            return None
        block_table = cached + self._pool.allocate(num_missing)
        spare_blocks = self._pool.allocate(num_spare)
        self._scheduler.num_reserved_seqs += num_seqs
        return Reservation(request, num_tokens, block_table, len(cached), spare_blocks, num_seqs, probe.block_keys)

    def take(self, reservation: Reservation) -> None:
        """End a reservation whose blocks now belong to the caller."""
        del self._granted[reservation.request.request_id]
        self._scheduler.num_reserved_seqs -= reservation.num_seqs

    def cancel(self, reservation: Reservation) -> None:
        """Free a reservation, if it still is one. Nothing may be writing to its blocks any more."""
        if self._granted.get(reservation.request.request_id) is reservation:
            self.take(reservation)
            self._pool.release(reservation.block_table + reservation.spare_blocks)

    def withdraw(self, request_id: str) -> None:
        """Forget a request's wish, and free its reservation if it has one."""
        self._pending = deque(entry for entry in self._pending if entry[0].request_id != request_id)
        if (reservation := self._granted.get(request_id)) is not None:
            self.cancel(reservation)
