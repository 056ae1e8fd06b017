"""Claims on memory that this replica lends out, each with a deadline on the owner's clock.

Owns who may still read what, and when it is free again. Knows nothing of blocks, slabs or transports: what is lent is
an opaque ``payload``.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from epd.errors import HandleExpiredError, TransferError

__all__ = ["LeaseTable"]

Payload = TypeVar("Payload")


@dataclass(slots=True)
class _Claim(Generic[Payload]):
    payload: Payload
    num_bytes: int
    on_free: Callable[[], None]
    published_s: float
    deadline_s: float
    num_holds: int = 0
    has_ended: bool = False


class LeaseTable(Generic[Payload]):
    """Thread-safe table of claims.

    A claim ends by ``release``, by ``expire`` once its deadline has passed, or by ``close``. A read that is under way
    at that moment keeps the memory to its end (``hold``); ``on_free`` follows, exactly once and outside the table's
    lock. Until ``expire`` has run, a claim past its deadline still stands: its memory is still there, and a renewal
    revives it.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._lock = threading.Lock()
        self._claims: dict[str, _Claim[Payload]] = {}
        self._live_bytes = 0
        self.is_closed = False

    @property
    def num_live(self) -> int:
        return len(self._claims)

    @property
    def live_bytes(self) -> int:
        """Bytes claimed, counting memory once for each claim on it."""
        return self._live_bytes

    @property
    def oldest_s(self) -> float:
        """How long ago the oldest live claim was published, however often it was renewed; 0 without any."""
        with self._lock:
            # Claims stand in the order of their publication.
            oldest = next(iter(self._claims.values()), None)
            return 0.0 if oldest is None else self._clock() - oldest.published_s

    def publish(self, payload: Payload, num_bytes: int, on_free: Callable[[], None]) -> str:
        """Add a claim and return its handle id, which cannot be guessed. Raises ``TransferError`` once closed."""
        handle_id = uuid.uuid4().hex
        with self._lock:
            if self.is_closed:
                raise TransferError("this replica is shutting down and lends nothing out any more")
            now_s = self._clock()
            self._claims[handle_id] = _Claim(payload, num_bytes, on_free, now_s, now_s + self.lease_s)
            self._live_bytes += num_bytes
        return handle_id

    def renew(self, handle_id: str) -> None:
        """Start the lease anew. Raises ``HandleExpiredError``."""
        with self._lock:
            self._find(handle_id).deadline_s = self._clock() + self.lease_s

    def release(self, handle_id: str) -> None:
        """End a claim. Unknown and ended ids are ignored."""
        with self._lock:
            freed = self._end([handle_id] if handle_id in self._claims else [])
        _free(freed)

    def expire(self) -> int:
        """End the claims whose deadline has passed; return how many."""
        with self._lock:
            now_s = self._clock()
            overdue = [handle_id for handle_id, claim in self._claims.items() if claim.deadline_s <= now_s]
            freed = self._end(overdue)
        _free(freed)
        return len(overdue)

    def close(self) -> None:
        """End all claims and refuse new ones."""
        with self._lock:
            self.is_closed = True
            freed = self._end(list(self._claims))
        _free(freed)

    @contextmanager
    def hold(self, handle_id: str) -> Iterator[Payload]:
        """Keep a claim's memory for the length of a read. Raises ``HandleExpiredError``."""
        with self._lock:
            claim = self._find(handle_id)
            claim.num_holds += 1
        try:
            yield claim.payload
        finally:
            with self._lock:
                claim.num_holds -= 1
                is_free = claim.has_ended and claim.num_holds == 0
            if is_free:
                claim.on_free()

    def _find(self, handle_id: str) -> _Claim[Payload]:
        claim = self._claims.get(handle_id)
        if claim is None:
            raise HandleExpiredError(f"handle {handle_id} was released or its lease ran out")
        return claim

    def _end(self, handle_ids: list[str]) -> list[_Claim[Payload]]:
        """Take claims out of the table; return those that no read holds. The caller has the lock."""
        freed = []
        for handle_id in handle_ids:
            claim = self._claims.pop(handle_id)
            claim.has_ended = True
            self._live_bytes -= claim.num_bytes
            if claim.num_holds == 0:
                freed.append(claim)
        return freed


def _free(claims: list[_Claim[Payload]]) -> None:
    for claim in claims:
        claim.on_free()
