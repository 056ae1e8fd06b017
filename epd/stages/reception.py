"""Blocks that wait, on a decode replica, for the KV of a prompt that is still being prefilled elsewhere.

Owns the reservation, its opening to the prefilling replica, and the rule when it may be reused: once everything has
landed, once the writer has said that it stopped, or once it is dead. Until then the blocks are out of use. Knows
nothing of how blocks are written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from epd.engine.engine import Engine
from epd.engine.engine_thread import EngineThread
from epd.engine.reservations import Reservation
from epd.errors import EpdError, PeerGoneError
from epd.stages.data_plane import DataPlane
from epd.transfer.base import KVConnector, PeerClient
from epd.types import AwaitedPrefill, KVTarget, Prefilled, PushedKV

__all__ = ["Reception"]

_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 5.0


class Reception:
    """One request's blocks, from the wish for them to the end of the wait. Runs on the event loop."""

    def __init__(
        self,
        source: AwaitedPrefill,
        reserve: Callable[[], Awaitable[Reservation]],
        engine: EngineThread,
        connector: KVConnector,
        data: DataPlane,
        peers: PeerClient,
    ) -> None:
        self._source = source
        self._reserve = reserve
        self._engine = engine
        self._connector = connector
        self._data = data
        self._peers = peers
        self._reservation: Reservation | None = None
        self._target: KVTarget | None = None
        self._opening: asyncio.Task[Reservation] | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Reserve blocks and offer them, in the background; on leaving, see that nobody writes to them any more."""
        if self._connector.supports_push:
            self._opening = asyncio.create_task(self._open())
        try:
            yield
        finally:
            await self._leave()

    async def _open(self) -> Reservation:
        reservation = self._reservation = await self._reserve()
        if reservation.missing_blocks:
            self._target = self._connector.accept(reservation.missing_blocks, reservation.num_cached_blocks)
            # A prefill that is over, or a replica that cannot be reached, writes nothing: the blocks are fetched then.
            with contextlib.suppress(EpdError):
                await self._peers.push_to(self._source.replica_id, self._source.leg_id, self._target)
        return reservation

    async def reservation(self) -> Reservation:
        """Wait for the blocks."""
        return await (self._reserve() if self._opening is None else asyncio.shield(self._opening))

    async def landed(self, prefilled: Prefilled) -> bool:
        """Wait until pushed blocks are complete; ``False`` if they were not pushed here. Raises ``TransferError``.

        In both cases nobody writes to the target any more.
        """
        kv, target = prefilled.kv, self._target
        is_here = target is not None and isinstance(kv, PushedKV) and kv.target_id == target.target_id
        if target is not None:
            if is_here:
                await self._connector.landed(target.target_id)
            self._forget()
        return is_here

    def _forget(self) -> None:
        if self._target is not None:
            self._connector.close_target(self._target.target_id)
            self._target = None

    async def _leave(self) -> None:
        """Give up what was not used. The blocks move out of the request's hands while somebody may write to them."""
        if self._opening is None:
            return
        self._opening.cancel()
        await asyncio.gather(self._opening, return_exceptions=True)
        if self._target is not None and self._reservation is not None:
            target, reservation, holds = self._target, self._reservation, _Holds()
            self._target = None
            self._engine.post(partial(holds.add, reservation))
            self._data.spawn(self._quarantine(target, holds))

    async def _quarantine(self, target: KVTarget, holds: _Holds) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._peers.stop_push(self._source.replica_id, target.target_id)
                break
            except PeerGoneError:
                break
            except EpdError:  # it may be frozen, and write when it thaws
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        self._connector.close_target(target.target_id)
        self._engine.post(holds.release)


class _Holds:
    """The hold on a reservation's blocks: made and ended on the engine's thread."""

    def __init__(self) -> None:
        self._hold_id: int | None = None

    def add(self, reservation: Reservation, engine: Engine) -> None:
        self._hold_id = engine.hold_reservation(reservation)

    def release(self, engine: Engine) -> None:
        if self._hold_id is not None:
            engine.release_hold(self._hold_id)
