"""Pushing a prompt's KV blocks to the replica that will decode it, while later chunks are still being computed.

    engine   |--chunk 0--|--chunk 1--|--chunk 2--|
    here                 |-push 0-|  |-push 1-|  |-push 2, notice|      exposed: the last one only

Owns, on the prefilling replica, which targets belong to which leg, and the one writer that each has. Blocks that are
being written out are held in the engine for exactly that long. Knows nothing of who reserved the target, or why.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator

from epd.engine.engine import Engine, PrefillDone
from epd.engine.engine_thread import EngineThread, RequestStream
from epd.errors import TransferError
from epd.stages.late_inputs import LateInputs, Leg
from epd.transfer.base import KVConnector
from epd.types import KVTarget

__all__ = ["Push", "Pushes"]

_MAX_STOPPED = 4096


class Pushes:
    """All pushes of one replica. Runs on the event loop."""

    def __init__(self, engine: EngineThread, connector: KVConnector, keep_s: float) -> None:
        self._engine = engine
        self._connector = connector
        self._offers: LateInputs[KVTarget] = LateInputs(lambda target: None, keep_s=keep_s)
        self._writers: dict[str, asyncio.Task[KVTarget]] = {}
        self._stopped: OrderedDict[str, None] = OrderedDict()

    @property
    def num_writing(self) -> int:
        return len(self._writers)

    def offer(self, leg_id: str, target: KVTarget) -> bool:
        """Say where a leg's blocks are wanted; ``False`` means that nothing will be written there."""
        return target.target_id not in self._stopped and self._offers.provide(leg_id, 0, target)

    async def stop(self, target_id: str) -> None:
        """Return once nothing is being written to a target, and nothing will be."""
        self._stopped[target_id] = None
        if len(self._stopped) > _MAX_STOPPED:
            self._stopped.popitem(last=False)
        if (writer := self._writers.get(target_id)) is not None:
            writer.cancel()
            await asyncio.wait([writer])

    @contextlib.asynccontextmanager
    async def pushing(self, leg_id: str, stream: RequestStream) -> AsyncIterator[Push]:
        """Push what a prefill computes, if somebody offers a target; on leaving, nothing is written any more."""
        with self._offers.leg(leg_id, frozenset({0}) if self._connector.supports_push else frozenset()) as leg:
            push = Push(self, leg, stream)
            try:
                yield push
            finally:
                await push.end()

    async def write(self, target: KVTarget, stream: RequestStream) -> KVTarget:
        """Write blocks as they are computed, to the end of the prefill. Raises ``TransferError``."""
        writer = asyncio.current_task()
        assert writer is not None
        if target.target_id in self._stopped:
            raise TransferError("the blocks are not wanted there any more")
        self._writers[target.target_id] = writer
        try:
            next_block = target.first_block
            while not stream.is_prefill_done:
                num_written = await self._write_computed(target, stream.request_id, next_block)
                next_block += num_written
                if not num_written:
                    await stream.progress()
            done = await stream.prefill_done()
            # What is done is held for this leg; leaving the stream ends that, and comes after this.
            await self._connector.push(target, done.block_ids[next_block:], next_block, is_last=True)
            return target
        finally:
            del self._writers[target.target_id]

    async def _write_computed(self, target: KVTarget, request_id: str, first_block: int) -> int:
        """Write the full blocks from ``first_block`` on that are computed; return how many those are."""
        held = _Held(self._engine, request_id, first_block)
        async with held as block_ids:
            if block_ids:
                await self._connector.push(target, block_ids, first_block, is_last=False)
            return len(block_ids)


class _Held:
    """Computed blocks, held in the engine while they are being read."""

    def __init__(self, engine: EngineThread, request_id: str, first_block: int) -> None:
        self._engine = engine
        self._request_id = request_id
        self._first_block = first_block
        self._hold_id: int | None = None

    def _hold(self, engine: Engine) -> tuple[int, ...]:
        held = engine.hold_computed(self._request_id, self._first_block)
        if held is None:
            return ()
        self._hold_id, block_ids = held
        return block_ids

    def _release(self, engine: Engine) -> None:
        if self._hold_id is not None:
            engine.release_hold(self._hold_id)

    async def __aenter__(self) -> tuple[int, ...]:
        try:
            return await self._engine.call(self._hold)
        except BaseException:
            # A cancelled call still runs: what it held is released after it.
            self._engine.post(self._release)
            raise

    async def __aexit__(self, *exc_info: object) -> None:
        if self._hold_id is not None:
            self._engine.post(self._release)


class Push:
    """The push of one leg, which may never come to anything."""

    def __init__(self, pushes: Pushes, leg: Leg[KVTarget], stream: RequestStream) -> None:
        self._leg = leg
        self._has_target = False
        self._writing = asyncio.create_task(self._run(pushes, stream)) if 0 in leg else None

    async def _run(self, pushes: Pushes, stream: RequestStream) -> KVTarget:
        target = await self._leg.take()
        self._has_target = True
        return await pushes.write(target, stream)

    async def finished(self, done: PrefillDone) -> KVTarget | None:
        """Return where all of a finished prefill's blocks are, or ``None`` if they are here only, because nobody asked
        for them in time. Raises ``TransferError`` if they could not be written."""
        writing = self._writing
        if writing is None or not self._has_target or done.hold_id is None:
            return None
        await asyncio.wait([writing])
        return None if writing.cancelled() else writing.result()

    async def end(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
