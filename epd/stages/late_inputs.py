"""Inputs that follow the call they belong to, because they are still being made when its leg starts.

Owns, on the replica that runs the leg, who waits for what and what came too early. A message may overtake the call that
it belongs to, so what arrives for a leg that is not there yet is kept for a while. Whoever takes an input over is
responsible for what it claims; one that nobody took is given up here. Knows nothing of what inputs are: embeddings of
a prompt, by item, the result of a prefill, or where to push its blocks. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["LateInputs", "Leg"]

_MAX_EARLY_LEGS = 1024
_MAX_ENDED_LEGS = 4096

T = TypeVar("T")


class Leg(Generic[T]):
    """What one leg waits for, by index."""

    def __init__(self, awaited: frozenset[int], give_up: Callable[[T], None]) -> None:
        self._give_up = give_up
        self._arriving: dict[int, asyncio.Future[T]] = {
            index: asyncio.get_running_loop().create_future() for index in awaited
        }

    def __contains__(self, index: int) -> bool:
        return index in self._arriving

    async def take(self, index: int = 0) -> T:
        """Wait for an input; from then on it is the caller's."""
        value = await asyncio.shield(self._arriving[index])
        del self._arriving[index]
        return value

    def decline(self, index: int) -> None:
        """Say that an input is not needed any more."""
        arriving = self._arriving.pop(index)
        if arriving.done():
            self._give_up(arriving.result())

    def put(self, index: int, value: T) -> bool:
        """Hand an input over; return whether it was wanted."""
        arriving = self._arriving.get(index)
        if arriving is None or arriving.done():
            return False
        arriving.set_result(value)
        return True

    def close(self) -> None:
        for index in list(self._arriving):
            self.decline(index)


@dataclass(slots=True)
class _Early(Generic[T]):
    """What came for a leg ahead of its call."""

    arrived_s: float
    inputs: dict[int, T] = field(default_factory=dict)


class LateInputs(Generic[T]):
    """See the module. ``give_up`` is told of inputs that nobody took."""

    def __init__(
        self,
        give_up: Callable[[T], None],
        *,
        keep_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``keep_s`` bounds how long an input waits for its leg; leases end what is kept longer anyway."""
        self._give_up = give_up
        self._keep_s = keep_s
        self._clock = clock
        self._legs: dict[str, Leg[T]] = {}
        self._early: OrderedDict[str, _Early[T]] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    @property
    def num_early(self) -> int:
        """Inputs that wait for a leg that has not come."""
        return sum(len(early.inputs) for early in self._early.values())

    def provide(self, leg_id: str, index: int, value: T) -> bool:
        """Take an input; ``False`` means that nobody wants it, and that it is still the caller's."""
        self._drop_old()
        if (leg := self._legs.get(leg_id)) is not None:
            return leg.put(index, value)
        if leg_id in self._ended:
            return False
        early = self._early.setdefault(leg_id, _Early[T](self._clock()))
        if index in early.inputs:
            return False
        early.inputs[index] = value
        return True

    @contextmanager
    def leg(self, leg_id: str, awaited: frozenset[int]) -> Iterator[Leg[T]]:
        """Open a leg for as long as it runs; what it did not take is given up at its end."""
        self._drop_old()
        leg = Leg(awaited, self._give_up)
        if not awaited:
            yield leg
            return
        early = self._early.pop(leg_id, None)
        for index, value in early.inputs.items() if early is not None else ():
            if not leg.put(index, value):
                self._give_up(value)
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
            for value in early.inputs.values():
                self._give_up(value)
