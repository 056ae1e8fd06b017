"""Taking over requests that were prefilled elsewhere: their KV blocks into this replica's engine, by push or by fetch.

Owns the way from a prefill's result to a running sequence, and what a transfer that failed means for the request. Knows
nothing of prompts that are computed here, nor of media.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial

from epd.config import TransferConfig
from epd.engine.engine_thread import EngineThread, RequestStream
from epd.engine.reservations import Reservation
from epd.errors import RequestReturnedError, StageFailedError, TransferError
from epd.stages.data_plane import DataPlane
from epd.stages.late_inputs import LateInputs
from epd.stages.reception import Reception
from epd.stages.stats import Counters
from epd.transfer.base import KVConnector, PeerClient
from epd.types import (
    AwaitedPrefill,
    KVHandle,
    ModelFamily,
    Prefilled,
    PushedKV,
    Request,
    StageReport,
    TokenChunk,
)

__all__ = ["Takeovers"]

_LOG = logging.getLogger(__name__)

Chunks = AsyncGenerator[tuple[TokenChunk, ...]]


class Takeovers:
    """See the module. Runs on the event loop of the replica that decodes."""

    def __init__(
        self,
        engine: EngineThread,
        connector: KVConnector,
        data: DataPlane,
        peers: PeerClient,
        family: ModelFamily,
        transfer: TransferConfig,
        counters: Counters,
    ) -> None:
        self._engine = engine
        self._connector = connector
        self._data = data
        self._peers = peers
        self._family = family
        self._transfer = transfer
        self._counters = counters
        self._prefills: LateInputs[Prefilled] = LateInputs(self._give_up, keep_s=transfer.lease_s)

    def resume(self, leg_id: str, prefilled: Prefilled) -> bool:
        """See ``StageClient``."""
        return self._prefills.provide(leg_id, 0, prefilled)

    async def prefilled(self, request: Request, prefilled: Prefilled) -> AsyncGenerator[tuple[TokenChunk, ...]]:
        """Decode from a prefill's result."""
        if prefilled.kv is None:
            return
        async with (
            self._engine.stream(request.request_id) as stream,
            contextlib.aclosing(self._decode_from(request, prefilled, stream, None)) as run,
        ):
            async for chunks in run:
                yield chunks

    async def awaited(
        self, request: Request, source: AwaitedPrefill, counted: Callable[[Chunks], Chunks]
    ) -> AsyncGenerator[tuple[TokenChunk, ...]]:
        """Make room while the prompt is being prefilled elsewhere; decode, ``counted`` as such, once it is done."""
        reserve = partial(self._reserve, request, request.num_prefill_tokens)
        reception = Reception(source, reserve, self._engine, self._connector, self._data, self._peers)
        with self._prefills.leg(source.leg_id, frozenset({0})) as leg:
            async with self._engine.stream(request.request_id) as stream, reception.open():
                prefilled = await leg.take()
                if prefilled.kv is None:
                    return
                run = counted(self._decode_from(request, prefilled, stream, reception))
                async with contextlib.aclosing(run):
                    async for chunks in run:
                        yield chunks

    async def _decode_from(
        self, request: Request, prefilled: Prefilled, stream: RequestStream, reception: Reception | None
    ) -> AsyncGenerator[tuple[TokenChunk, ...]]:
        report = await self._take_over(request, prefilled, reception)
        async for chunks in stream:
            yield (replace(chunks[0], report=report + (chunks[0].report or StageReport())), *chunks[1:])
            report = StageReport()

    async def _take_over(self, request: Request, prefilled: Prefilled, reception: Reception | None) -> StageReport:
        """Get a prefilled request's blocks into this engine and let it run."""
        engine, connector, kv = self._engine, self._connector, prefilled.kv
        assert kv is not None
        started_s = time.monotonic()
        num_bytes = 0
        reservation: Reservation | None = None
        is_active = False
        try:
            if reception is not None and isinstance(kv, PushedKV):
                await self._await_pushed(request, prefilled, reception)
                reservation = await reception.reservation()
                has_kv = True
            elif isinstance(kv, KVHandle):
                async with self._data.kept_alive(kv):
                    if reception is None:
                        reservation = await self._reserve(request, kv.num_tokens)
                    else:
                        reservation = await reception.reservation()
                        await reception.landed(prefilled)
                    has_kv, num_bytes = await self._fetch_blocks(kv, reservation)
            else:
                raise StageFailedError("decode", "KV blocks were pushed to a leg that asked for none")
            if not has_kv:
                self._counters.transfer_failures["kv"] += 1
                self._check_recomputable(request)
            rotary = replace(self._family.rotary_positions(request), delta=kv.rotary_delta)
            held = reservation
            await engine.call(lambda running: running.activate(held, prefilled.first_tokens, rotary, has_kv=has_kv))
            is_active = True
        finally:
            if reservation is not None and not is_active:
                unused = reservation
                engine.post(lambda running: running.cancel_reservation(unused))
            if isinstance(kv, KVHandle):
                self._data.release_soon(kv)
        if num_bytes:
            self._counters.transferred("kv", connector.backend, num_bytes)
        transferred = {"kv": num_bytes} if isinstance(kv, KVHandle) else {}
        return StageReport({"kv_transfer": time.monotonic() - started_s}, transferred)

    async def _await_pushed(self, request: Request, prefilled: Prefilled, reception: Reception) -> None:
        try:
            if await reception.landed(prefilled):
                return
        except TransferError as error:
            _LOG.warning("pushed KV blocks did not arrive: %s", error)
        # They may arrive yet, so these blocks cannot be used now; another placement starts with fresh ones.
        self._counters.transfer_failures["kv"] += 1
        if self._transfer.on_failure == "fail":
            raise StageFailedError("transfer", "pushed KV blocks did not arrive")
        raise RequestReturnedError(request.request_id, "its KV blocks did not arrive")

    async def _fetch_blocks(self, handle: KVHandle, reservation: Reservation) -> tuple[bool, int]:
        """Fetch what the prefix cache lacks; return whether it is all here, and the bytes moved."""
        if not reservation.missing_blocks:
            return True, 0
        try:
            fetched = await self._connector.fetch(handle, reservation.missing_blocks, reservation.num_cached_blocks)
        except TransferError:
            if self._transfer.on_failure == "fail":
                self._counters.transfer_failures["kv"] += 1
                raise
            return False, 0
        return not fetched.failed, fetched.num_bytes

    async def _reserve(self, request: Request, num_tokens: int) -> Reservation:
        """Wait for blocks; the engine grants them in the order asked, and leaving the stream withdraws the wish."""
        engine, loop = self._engine, asyncio.get_running_loop()
        granted: asyncio.Future[Reservation] = loop.create_future()

        def grant(reservation: Reservation) -> None:
            loop.call_soon_threadsafe(lambda: None if granted.done() else granted.set_result(reservation))

        await engine.call(lambda running: running.reserve(request, num_tokens, grant))
        return await granted

    def _check_recomputable(self, request: Request) -> None:
        """Decide what a failed transfer means: a text prompt is prefilled here, one with media goes back."""
        if self._transfer.on_failure == "fail":
            raise StageFailedError("transfer", "some KV blocks could not be fetched")
        if request.items:
            raise RequestReturnedError(request.request_id, "its KV blocks could not be fetched")

    def _give_up(self, prefilled: Prefilled) -> None:
        """Release the blocks of a prefill that nobody decodes any more."""
        if isinstance(prefilled.kv, KVHandle):
            self._data.release_soon(prefilled.kv)
