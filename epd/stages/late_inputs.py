"""Inputs that follow the call they belong to: embeddings that are still being made when their prompt's leg starts.

Owns, on the replica that runs the leg, who waits for what and what came too early. A message may overtake the call that
it belongs to, so what arrives for a leg that is not there yet is kept for a while. Whoever takes a handle over releases
it; one that nobody took is given up here. Knows nothing of engines or transfers. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from epd.types import EmbeddingHandle

__all__ = ["LateInputs", "Leg"]

_MAX_EARLY_LEGS = 1024
_MAX_ENDED_LEGS = 4096


class Leg:
    """What one leg waits for, by item index."""

    def __init__(self, awaited: frozenset[int], give_up: Callable[[EmbeddingHandle], None]) -> None:
        self._give_up = give_up
        self._arriving: dict[int, asyncio.Future[EmbeddingHandle]] = {
            index: asyncio.get_running_loop().create_future() for index in awaited
        }

    def __contains__(self, index: int) -> bool:
        return index in self._arriving

    async def handle(self, index: int) -> EmbeddingHandle:
        """Wait for an item's handle; from then on the caller releases it."""
        handle = await asyncio.shield(self._arriving[index])
        del self._arriving[index]
        return handle

    def decline(self, index: int) -> None:
        """Say that an item is not needed any more."""
        arriving = self._arriving.pop(index)
        if arriving.done():
            self._give_up(arriving.result())

    def put(self, index: int, handle: EmbeddingHandle) -> bool:
        """Hand a handle over; return whether it was wanted."""
        arriving = self._arriving.get(index)
        if arriving is None or arriving.done():
            return False
        arriving.set_result(handle)
        return True

    def close(self) -> None:
        for index in list(self._arriving):
            self.decline(index)


@dataclass(slots=True)
class _Early:
    """What came for a leg ahead of its call."""

    arrived_s: float
    handles: dict[int, EmbeddingHandle] = field(default_factory=dict)


class LateInputs:
    """See the module. ``give_up`` is told of handles that nobody took."""

    def __init__(
        self,
        give_up: Callable[[EmbeddingHandle], None],
        *,
        keep_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``keep_s`` bounds how long an input waits for its leg; leases end what is kept longer anyway."""
        self._give_up = give_up
        self._keep_s = keep_s
        self._clock = clock
        self._legs: dict[str, Leg] = {}
        self._early: OrderedDict[str, _Early] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    @property
    def num_early(self) -> int:
        """Handles that wait for a leg that has not come."""
        return sum(len(early.handles) for early in self._early.values())

    def provide(self, leg_id: str, index: int, handle: EmbeddingHandle) -> bool:
        """Take an input; ``False`` means that nobody wants it, and that it is still the caller's to release."""
        self._drop_old()
        if (leg := self._legs.get(leg_id)) is not None:
            return leg.put(index, handle)
        if leg_id in self._ended:
            return False
        early = self._early.setdefault(leg_id, _Early(self._clock()))
        if index in early.handles:
            return False
        early.handles[index] = handle
        return True

    @contextmanager
    def leg(self, leg_id: str, awaited: frozenset[int]) -> Iterator[Leg]:
        """Open a leg for as long as it runs; what it did not take is given up at its end."""
        self._drop_old()
        leg = Leg(awaited, self._give_up)
        if not awaited:
            yield leg
            return
        early = self._early.pop(leg_id, None)
        for index, handle in early.handles.items() if early is not None else ():
            if not leg.put(index, handle):
                self._give_up(handle)
        self._legs[leg_id] = leg
        try:
            yield leg
        finally:
            del self._legs[leg_id]
            self._ended[leg_id] = None
            if len(self._ended) > _MAX_ENDED_LEGS:
                self._ended.popitem(last=False)
            leg.close()

    def _drop_old(self) -> None:
        while self._early:
            leg_id, early = next(iter(self._early.items()))
            if len(self._early) <= _MAX_EARLY_LEGS and self._clock() - early.arrived_s < self._keep_s:
                return
            del self._early[leg_id]
            for handle in early.handles.values():
                self._give_up(handle)
