"""Runs an engine on a thread of its own and speaks asyncio to the outside.

The engine is touched by its thread only: callers hand in functions that run between steps, and results come back as
streams of token chunks, delivered to the event loop once a step. So a forward pass never blocks the loop, and a slow
reader never blocks the engine: what it has not read yet is coalesced. Knows nothing of transfers or placement.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from epd.engine.engine import Engine, EngineStats, PrefillDone, StepOutput
from epd.errors import EpdError, RequestReturnedError, StageFailedError
from epd.types import TokenChunk

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine had to do when its last step ended."""

    num_waiting: int = 0
    num_running: int = 0
    num_queued_prefill_tokens: int = 0
    num_context_tokens: int = 0
    num_free_blocks: int = 0
    num_live_requests: int = 0


class RequestStream:
    """The output of one request, read by one task on the event loop."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._chunks: list[TokenChunk] = []
        self._prefill_done: asyncio.Future[PrefillDone] = asyncio.get_running_loop().create_future()
        self._has_news = asyncio.Event()
        self._has_progressed = asyncio.Event()
        self._is_finished = False
        self._is_hold_taken = False
        self._error: BaseException | None = None

    def __aiter__(self) -> AsyncIterator[tuple[TokenChunk, ...]]:
        return self

    async def __anext__(self) -> tuple[TokenChunk, ...]:
        """Return all tokens that are ready, at least one. Raises what ended the request, after its last token."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._is_finished:
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        chunks, self._chunks = self._chunks, []
        return coalesce(chunks)

    async def prefill_done(self) -> PrefillDone:
        """Wait for the prefill of a ``keep_kv`` request. Raises what ended it."""
        return await asyncio.shield(self._prefill_done)  # a cancelled reader must not cancel the result

    @property
    def is_prefill_done(self) -> bool:
        """Whether ``prefill_done`` would return, or raise, at once."""
        return self._prefill_done.done()

    async def progress(self) -> None:
        """Wait until more of a ``keep_kv`` request has been computed than when this was last called."""
        await self._has_progressed.wait()
        self._has_progressed.clear()

    def take_hold(self) -> None:
        """Take over the blocks that a finished prefill holds; until then, leaving the stream frees them."""
        self._is_hold_taken = True

    @property
    def orphaned_hold(self) -> int | None:
        """Held blocks that nobody took over, because the reader was cancelled as they arrived."""
        if self._is_hold_taken or not self._prefill_done.done() or self._prefill_done.exception() is not None:
            return None
        return self._prefill_done.result().hold_id

    def feed(self, chunks: Iterable[TokenChunk]) -> None:
        self._chunks.extend(chunks)
        self._has_news.set()

    def note_progress(self) -> None:
        self._has_progressed.set()

    def finish(self) -> None:
        self._is_finished = True
        self._has_news.set()

    def fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        if not self._prefill_done.done():
            self._prefill_done.set_exception(error)
            self._prefill_done.exception()  # marks it as seen: a streaming reader never looks at this future
        self._has_news.set()
        self._has_progressed.set()

    def set_prefill_done(self, done: PrefillDone) -> None:
        if not self._prefill_done.done():
            self._prefill_done.set_result(done)
        self._has_progressed.set()


def coalesce(chunks: Iterable[TokenChunk]) -> tuple[TokenChunk, ...]:
    """Join chunks of the same choice, keeping the order of choices by their first token."""
    joined: dict[int, TokenChunk] = {}
    for chunk in chunks:
        before = joined.get(chunk.choice)
        if before is None:
            joined[chunk.choice] = chunk
            continue
        reports = [report for report in (before.report, chunk.report) if report is not None]
        joined[chunk.choice] = replace(
            chunk,
            token_ids=before.token_ids + chunk.token_ids,
            logprobs=before.logprobs + chunk.logprobs,
            report=reports[0] + reports[1] if len(reports) == 2 else next(iter(reports), None),
        )
    return tuple(joined.values())


class EngineThread:
    """Owns the thread. ``start`` inside the event loop that reads the streams; ``close`` ends the thread."""

    def __init__(self, engine: Engine, *, num_threads: int | None = None) -> None:
        self._engine = engine
        self._num_threads = num_threads
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._streams: dict[str, RequestStream] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._ended: StageFailedError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.load = EngineLoad(num_free_blocks=engine.pool.num_free)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """End the thread after the step that runs. Streams that are still open fail, and so do calls."""
        self._commands.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._end(StageFailedError("engine", "the replica is shutting down"))

    @property
    def stats(self) -> EngineStats:
        """The engine's counters; single numbers, safe to read from any thread."""
        return self._engine.stats

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # -- from the event loop ------------------------------------------------------------------------------------------

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function on the engine between two steps and return its result.

        Raises what the function raises, and ``StageFailedError`` if the engine ends first.
        """
        if self._ended is not None:
            raise self._ended
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run(engine: Engine) -> None:
            try:
                result = function(engine)
            except Exception as error:  # handed to the caller, who awaits it
                loop.call_soon_threadsafe(_set_exception, future, error)
            else:
                loop.call_soon_threadsafe(_set_result, future, result)

        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._commands.put(run)
        return await future

    def post(self, function: Callable[[Engine], None]) -> None:
        """Run a function on the engine between two steps, after all that was handed in before. From any thread."""
        self._commands.put(function)

    @contextlib.asynccontextmanager
    async def stream(self, request_id: str) -> AsyncIterator[RequestStream]:
        """Open the output of a request before adding it; on leaving, abort whatever is left of the request."""
        if request_id in self._streams:
            raise StageFailedError("engine", f"request {request_id} is already running on this replica")
        if self._ended is not None:
            raise self._ended
        stream = RequestStream(request_id)
        self._streams[request_id] = stream
        try:
            yield stream
        finally:
            del self._streams[request_id]
            hold_id = stream.orphaned_hold
            self.post(lambda engine: engine.abort(request_id))
            if hold_id is not None:
                self.post(lambda engine: engine.release_hold(hold_id))

    # -- on the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._run_steps()
        except Exception as error:
            # Whoever waits for this engine must hear of it now: a health check takes its time to find a dead thread.
            _LOG.exception("the engine stopped")
            ended = StageFailedError("engine", f"the engine stopped ({type(error).__name__})")
            self._on_loop(lambda: self._end(ended))

    def _run_steps(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        is_stalled = True
        while self._drain_commands(block=is_stalled):
            output = self._step()
            self.load = self._measure_load()
            # Nothing ran: what waits needs an embedding or blocks, and both arrive as a command.
            is_stalled = output is None or (output.num_tokens == 0 and not output.returned)
            if output is not None:
                self._on_loop(partial(self._deliver, output))
            self._engine.serve_reservations()

    def _drain_commands(self, *, block: bool) -> bool:
        """Run what was handed in; return false at the end of the thread."""
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            block = False
            try:
                command(self._engine)
            except Exception:
                _LOG.exception("a posted engine command failed")

    def _step(self) -> StepOutput | None:
        if not self._engine.has_work:
            return None
        try:
            return self._engine.step()
        except Exception as error:
            _LOG.exception("an engine step failed")
            self._fail_all(StageFailedError("engine", f"a step failed ({type(error).__name__})"))
            return None

    def _fail_all(self, error: EpdError) -> None:
        request_ids = self._engine.live_request_ids
        for request_id in request_ids:
            self._engine.abort(request_id)
        self._on_loop(partial(self._fail_streams, request_ids, error))

    def _on_loop(self, function: Callable[[], None]) -> None:
        assert self._loop is not None, "the thread is started from the loop"
        self._loop.call_soon_threadsafe(function)

    def _measure_load(self) -> EngineLoad:
        scheduler = self._engine.scheduler
        sequences = list(scheduler.sequences())
        return EngineLoad(
            num_waiting=len(scheduler.waiting) + self._engine.num_pending_reservations,
            num_running=len(scheduler.running),
            num_queued_prefill_tokens=sum(
                sequence.num_tokens - sequence.num_computed_tokens for sequence in sequences if not sequence.is_decoding
            ),
            num_context_tokens=sum(sequence.num_computed_tokens for sequence in scheduler.running),
            num_free_blocks=self._engine.pool.num_free,
            num_live_requests=self._engine.num_live_requests,
        )

    # -- delivery, on the event loop -----------------------------------------------------------------------------------

    def _deliver(self, output: StepOutput) -> None:
        for request_id, chunks in output.chunks.items():
            if (stream := self._streams.get(request_id)) is not None:
                stream.feed(chunks)
        for request_id in output.finished:
            if (stream := self._streams.get(request_id)) is not None:
                stream.finish()
        for request_id in output.returned:
            reason = "its KV blocks were needed and this replica lacks its embeddings"
            self._fail_streams((request_id,), RequestReturnedError(request_id, reason))
        for request_id in output.progressed:
            if (stream := self._streams.get(request_id)) is not None:
                stream.note_progress()
        for done in output.prefilled:
            if (stream := self._streams.get(done.request_id)) is not None:
                stream.set_prefill_done(done)
            elif (hold_id := done.hold_id) is not None:
                self.post(lambda engine, hold_id=hold_id: engine.release_hold(hold_id))  # type: ignore[misc]

    def _end(self, error: StageFailedError) -> None:
        """Fail all that waits for the engine, now and from now on."""
        self._ended = self._ended or error
        self._fail_streams(list(self._streams), self._ended)
        for future in list(self._calls):
            _set_exception(future, self._ended)

    def _fail_streams(self, request_ids: Iterable[str], error: EpdError) -> None:
        for request_id in request_ids:
            if (stream := self._streams.get(request_id)) is not None:
                stream.fail(error)


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():  # else the caller was cancelled
        future.set_result(result)


def _set_exception(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
