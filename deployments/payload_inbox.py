"""Media bytes that arrived ahead of the call that uses them. Knows nothing of Ray or of stages.

A message over gRPC stops at 4 MiB and token streams are five times faster there, so big payloads come first, through
the object store, and wait here under a ticket. A ticket that nobody claims expires: its ingress died.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from epd.errors import StageFailedError

TICKET_LIFETIME_S = 60.0


class PayloadInbox:
    """Holds deposited payloads by ticket until they are claimed, once, or expire. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deposits: dict[str, tuple[float, Mapping[int, bytes]]] = {}

    def deposit(self, ticket: str, payloads: Mapping[int, bytes]) -> None:
        self.expire()
        self._deposits[ticket] = (self._clock(), payloads)

    def claim(self, ticket: str) -> Mapping[int, bytes]:
        """Return and forget the payloads of a ticket. Raises ``StageFailedError`` if it is unknown or expired."""
        if ticket not in self._deposits:
            raise StageFailedError("hand-over of media", "the bytes sent ahead of the call are no longer held")
        return self._deposits.pop(ticket)[1]

    def discard(self, ticket: str) -> None:
        self._deposits.pop(ticket, None)

    def expire(self) -> None:
        oldest_s = self._clock() - TICKET_LIFETIME_S
        for ticket, (arrived_s, _) in list(self._deposits.items()):
            if arrived_s < oldest_s:
                del self._deposits[ticket]

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for _, payloads in self._deposits.values() for data in payloads.values())
