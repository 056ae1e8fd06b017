"""Token streams of one replica, read by one ingress, in one message a step: the two ends of a *channel*.

    replica    decode calls ──put──> Outlets ══one call: "outputs"══> TokenChannel ──put──> Lane ──> requests    ingress
                     └────────────────one call a request: "decode"──────────────────────────^

A message costs both ends some hundred microseconds whatever it carries, so what several streams have ready together
travels together. A request keeps a call of its own, which carries its errors, its cancellation and its end; its items
are numbered, and those that find no open channel travel there too. So a channel may open and end at any time: the
ingress opens it when a second stream runs on the replica, and the replica ends it when none has run for a while (Serve
waits for open calls before it stops a replica). Knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any
from uuid import uuid4

from deployments.messages import ChannelItem, ChannelMessage, LaneAddress
from epd.types import ReplicaLoad, TokenChunk

LINGER_S = 1.0
"""For how long a channel stays open without a stream; clients that ask again at once find it."""

Chunks = tuple[TokenChunk, ...]
OpenChannel = Callable[[str], AsyncGenerator[ChannelMessage]]
StartTask = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class ChannelLostError(Exception):
    """Items that were in a channel when it broke will not come."""


class _Outlet:
    """The items that wait for one channel."""

    def __init__(self) -> None:
        self.items: list[ChannelItem] = []
        self.news = asyncio.Event()


class Outlets:
    """The replica's end: the open channels, one for each ingress. Belongs to one event loop."""

    def __init__(self, linger_s: float = LINGER_S) -> None:
        self._linger_s = linger_s
        self._open: dict[str, _Outlet] = {}
        self._num_lanes: Counter[str] = Counter()

    @contextlib.contextmanager
    def lane(self, address: LaneAddress | None) -> Iterator[Callable[[int, Chunks], bool]]:
        """Count a stream; yield what hands an item to its channel, and says whether that is open."""
        if address is None:
            yield lambda index, chunks: False
            return
        channel_id, number = address.channel_id, address.number

        def put(index: int, chunks: Chunks) -> bool:
            outlet = self._open.get(channel_id)
            if outlet is None:
                return False
            outlet.items.append((number, index, _packed(chunks)))
            outlet.news.set()
            return True

        self._num_lanes[channel_id] += 1
        try:
            yield put
        finally:
            self._num_lanes[channel_id] -= 1
            if not self._num_lanes[channel_id]:
                del self._num_lanes[channel_id]
                if channel_id in self._open:
                    self._open[channel_id].news.set()

    async def messages(self, channel_id: str) -> AsyncGenerator[tuple[ChannelItem, ...]]:
        """Open a channel and yield what is ready, all of it at once, until no stream has used it for a while."""
        outlet = self._open[channel_id] = _Outlet()
        try:
            while await self._has_items(channel_id, outlet):
                items, outlet.items = tuple(outlet.items), []
                yield items
        finally:
            # No await since the last look at the outlet: nothing is left in it.
            if self._open.get(channel_id) is outlet:
                del self._open[channel_id]

    async def _has_items(self, channel_id: str, outlet: _Outlet) -> bool:
        while not outlet.items:
            outlet.news.clear()
            is_used = channel_id in self._num_lanes
            try:
                async with asyncio.timeout(None if is_used else self._linger_s):
                    await outlet.news.wait()
            except TimeoutError:
                if not outlet.items and channel_id not in self._num_lanes:
                    return False
        return True


class Lane:
    """One stream at the ingress: joins what comes through the channel and through its own call, in order."""

    def __init__(self, address: LaneAddress) -> None:
        self.address = address
        self._early: dict[int, Chunks] = {}
        self._next = 0
        self._has_ended = False
        self._error: BaseException | None = None
        self._is_channel_lost = False
        self._news = asyncio.Event()

    def put(self, index: int, chunks: Chunks) -> None:
        self._early[index] = chunks
        self._news.set()

    def end(self, error: BaseException | None = None) -> None:
        """Say that the stream's own call has ended. Its last item carries the highest index of all."""
        self._has_ended, self._error = True, error
        self._news.set()

    def lose_channel(self) -> None:
        """Say that the channel broke. What comes next through the call itself shows whether something is missing."""
        self._is_channel_lost = True
        self._news.set()

    async def items(self) -> AsyncGenerator[Chunks]:
        """Yield what has come, all that is ready at once. Raises what ended the stream, or ``ChannelLostError``."""
        while True:
            self._news.clear()
            if chunks := self._take():
                yield chunks
                continue
            if self._has_ended and self._error is not None:
                raise self._error
            if self._has_ended and not self._early:
                return
            if self._early and self._is_channel_lost:
                raise ChannelLostError("tokens were lost on their way")
            await self._news.wait()

    def _take(self) -> Chunks:
        chunks: Chunks = ()
        while self._next in self._early:
            chunks += self._early.pop(self._next)
            self._next += 1
        return chunks


class TokenChannel:
    """The ingress's end of the channel to one replica. Belongs to one event loop.

    ``open_channel`` calls the replica; ``start_task`` runs the reader outside of any request; ``on_load`` gets the
    loads that messages carry.
    """

    def __init__(
        self, open_channel: OpenChannel, start_task: StartTask, on_load: Callable[[ReplicaLoad], None]
    ) -> None:
        self._open_channel = open_channel
        self._start_task = start_task
        self._on_load = on_load
        self._channel_id = uuid4().hex
        self._lanes: dict[int, Lane] = {}
        self._num_opened = 0
        self._reading: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def lane(self) -> Iterator[Lane]:
        """Open a lane for one stream; the second one at the same time opens the channel."""
        self._num_opened += 1
        number = self._num_opened
        lane = self._lanes[number] = Lane(LaneAddress(self._channel_id, number))
        if len(self._lanes) > 1 and (self._reading is None or self._reading.done()):
            self._reading = self._start_task(self._read())
        try:
            yield lane
        finally:
            del self._lanes[number]

    async def _read(self) -> None:
        try:
            async with contextlib.aclosing(self._open_channel(self._channel_id)) as messages:
                async for message in messages:
                    if message.load is not None:
                        self._on_load(message.load)
                    for number, index, packed in message.items:
                        if (lane := self._lanes.get(number)) is not None:
                            lane.put(index, _unpacked(packed))
        except Exception:  # whatever broke the channel: the streams' own calls say what it was, and go on without it
            for lane in self._lanes.values():
                lane.lose_channel()


def _packed(chunks: Chunks) -> tuple[Any, ...]:
    """Write the usual chunk, which is nothing but tokens, as a plain tuple: it pickles several times faster."""
    return tuple(
        (chunk.choice, chunk.token_ids)
        if chunk.finish_reason is None and chunk.report is None and not chunk.logprobs
        else chunk
        for chunk in chunks
    )


def _unpacked(packed: tuple[Any, ...]) -> Chunks:
    return tuple(TokenChunk(*chunk) if type(chunk) is tuple else chunk for chunk in packed)
