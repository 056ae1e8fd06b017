"""The life of a request: encode -> prefill -> decode over replicas, in one function; and what happens when one fails.

    bytes ──> encode ──EmbeddingHandle──> prefill ──KVHandle──> decode ──> tokens
              (0..k replicas)             (1 replica)           (1 replica, often the same)

``run_stages`` is the undisturbed life. ``generate`` drives it, and places what is left of a request again when a
replica fails or gives it back: encode and prefill can be repeated, and a decode goes on after the tokens that were
already streamed. Of an encoder that fails, only its items go elsewhere (``epd.stages.encode_legs``). Knows nothing of
HTTP, text, or how a client reaches a replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self, TypeVar
from uuid import uuid4

from epd.errors import (
    DeadlineExceededError,
    EpdError,
    RequestReturnedError,
    StageFailedError,
    TransferError,
)
from epd.stages.encode_legs import EncodeLegs, LegFailed, Reassign
from epd.stages.tasks import unless_fails
from epd.types import (
    AwaitedPrefill,
    DecodeSource,
    EmbeddingHandle,
    Handle,
    KVHandle,
    Placement,
    Prefilled,
    Prompt,
    Request,
    StageClient,
    StageReport,
    TokenChunk,
)

T = TypeVar("T")
ClientOf = Callable[[str], StageClient]
Place = Callable[[Request, frozenset[str]], Placement]
_RELEASE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Update:
    """New tokens, and where they were made. ``num_attempts`` counts placements so far."""

    chunks: tuple[TokenChunk, ...]
    placement: Placement
    num_attempts: int = 1


@dataclass(frozen=True, slots=True)
class LifeOptions:
    """``overlap`` starts prefill while embeddings are still being made elsewhere; ``push`` starts decode, too, so that
    it makes room for the KV blocks, and they are written there while later ones are computed."""

    max_attempts: int = 3
    overlap: bool = True
    push: bool = True


async def run_stages(
    request: Request,
    placement: Placement,
    client_of: ClientOf,
    payloads: Mapping[int, bytes],
    reassign: Reassign,
    options: LifeOptions,
) -> AsyncGenerator[tuple[tuple[TokenChunk, ...], Placement]]:
    """Yield the output tokens of one placed request, and where they were made: other encoders may have stepped in.

    Adjacent stages on the same replica are one call to it. Whatever the stages hold for one another is released on
    every way out. Raises ``LegFailed``.
    """
    apart = {item.index: placement.encode[item.index] for item in request.items if _is_apart(placement, item.index)}
    local = {index: payload for index, payload in payloads.items() if index not in apart}
    encoding = EncodeLegs(request, apart, payloads, client_of, reassign, options.max_attempts)
    leg_id = uuid4().hex
    kv_claims: list[Handle] = []
    is_taken_over = False
    try:
        if placement.decode == placement.prefill:
            async with (
                _embeddings(leg_id, placement, client_of, encoding, options) as prompt,
                _Decoding(placement.decode, client_of, request, prompt, local) as decoding,
            ):
                chunks = await encoding.beside(decoding.first())
                is_taken_over = True
                await encoding.end()
                placement = encoding.as_run(placement)
                yield _with_report(chunks, encoding.report), placement
                with _blame(placement.decode):
                    async for chunks in decoding.stream:
                        yield chunks, placement
            return
        async with contextlib.AsyncExitStack() as legs:
            early: _Decoding | None = None
            if options.push:
                awaited = AwaitedPrefill(leg_id, placement.prefill)
                early = await legs.enter_async_context(_Decoding(placement.decode, client_of, request, awaited, {}))
                early.start()
            async with _embeddings(leg_id, placement, client_of, encoding, options) as prompt:
                prompt = replace(prompt, is_pushed=options.push)
                prefill = _prefill(placement.prefill, client_of, request, prompt, local)
                prefilled = await encoding.beside(prefill if early is None else early.beside(prefill))
            is_taken_over = True
            kv_claims = [prefilled.kv] if isinstance(prefilled.kv, KVHandle) else []
            placement = encoding.as_run(placement)
            first = _with_report(prefilled.first_tokens, encoding.report + prefilled.report), placement
            if prefilled.kv is None:
                yield first
                return
            if early is not None:
                early.resume(leg_id, prefilled)
                decoding = early
            else:
                late = _Decoding(placement.decode, client_of, request, prefilled, {})
                decoding = await legs.enter_async_context(late)
                decoding.start()
            yield first
            chunks = await decoding.first()
            kv_claims.clear()
            yield chunks, placement
            with _blame(placement.decode):
                async for chunks in decoding.stream:
                    yield chunks, placement
    finally:
        await _release([*kv_claims, *encoding.claims(is_taken_over=is_taken_over)], client_of)


async def _prefill(
    replica_id: str, client_of: ClientOf, request: Request, prompt: Prompt, payloads: Mapping[int, bytes]
) -> Prefilled:
    with _blame(replica_id):
        return await client_of(replica_id).prefill(request, prompt, payloads)


class _Decoding:
    """A decode leg that may be under way before it is read. Leaving it ends it."""

    def __init__(
        self,
        replica_id: str,
        client_of: ClientOf,
        request: Request,
        source: DecodeSource,
        payloads: Mapping[int, bytes],
    ) -> None:
        self._replica_id = replica_id
        self._client = client_of(replica_id)
        self.stream = self._client.decode(request, source, payloads)
        self._starting: asyncio.Task[tuple[TokenChunk, ...]] | None = None
        self._resuming: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        tasks = [task for task in (self._starting, self._resuming) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.stream.aclose()

    def start(self) -> None:
        """Call the replica now; ``first`` waits for what it says."""
        self._starting = asyncio.create_task(self._first())

    def resume(self, leg_id: str, prefilled: Prefilled) -> None:
        """Give a leg that awaits it its prefill."""
        self._resuming = asyncio.create_task(self._resume(leg_id, prefilled))

    async def beside(self, leg: Awaitable[T]) -> T:
        """Await another leg, unless this one fails first."""
        assert self._starting is not None
        return await unless_fails(leg, self._starting)

    async def first(self) -> tuple[TokenChunk, ...]:
        """Return the first chunks; none if there is nothing to decode."""
        if self._resuming is not None:
            return await unless_fails(self._started(), self._resuming)
        return await self._started()

    async def _started(self) -> tuple[TokenChunk, ...]:
        return await (self._first() if self._starting is None else self._starting)

    async def _first(self) -> tuple[TokenChunk, ...]:
        with _blame(self._replica_id):
            return await anext(self.stream, ())

    async def _resume(self, leg_id: str, prefilled: Prefilled) -> None:
        with _blame(self._replica_id):
            if not await self._client.resume(leg_id, prefilled):
                raise StageFailedError("decode", f"replica {self._replica_id} has given the request up")


def _is_apart(placement: Placement, index: int) -> bool:
    return bool(placement.encode) and placement.encode[index] != placement.prefill


@contextlib.asynccontextmanager
async def _embeddings(
    leg_id: str, placement: Placement, client_of: ClientOf, encoding: EncodeLegs, options: LifeOptions
) -> AsyncIterator[Prompt]:
    """Give the prompt to start from: at once, its embeddings to follow, or with all of them in it."""

    async def deliver(index: int, handle: EmbeddingHandle) -> bool:
        # A consumer that cannot be reached fails its own call, too, and that is where it is noticed.
        with contextlib.suppress(StageFailedError, TransferError):
            return await client_of(placement.prefill).provide(leg_id, index, handle)
        return False

    if options.overlap and encoding.items:
        async with encoding.running(deliver):
            yield Prompt(tuple(encoding.handles), encoding.items, leg_id)
    else:
        await encoding.run()
        yield Prompt(tuple(encoding.handles), leg_id=leg_id)


def _with_report(chunks: tuple[TokenChunk, ...], report: StageReport) -> tuple[TokenChunk, ...]:
    """Add what earlier legs took to the first chunk."""
    if not chunks or report == StageReport():
        return chunks
    first = chunks[0]
    merged = report if first.report is None else report + first.report
    return (TokenChunk(first.choice, first.token_ids, first.finish_reason, first.logprobs, merged), *chunks[1:])


@contextlib.contextmanager
def _blame(replica_id: str) -> Iterator[None]:
    """Say which replica an error came from."""
    try:
        yield
    except EpdError as error:
        raise LegFailed(replica_id, error) from error


async def _release(claims: list[Handle], client_of: ClientOf) -> None:
    """Give up claims that nobody fetched. Their leases would end them too, so a lost owner is not an error."""
    by_owner: dict[str, list[str]] = defaultdict(list)
    for handle in claims:
        by_owner[handle.owner].append(handle.handle_id)

    async def release(owner: str, handle_ids: list[str]) -> None:
        with contextlib.suppress(EpdError, TimeoutError):
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                await client_of(owner).release(handle_ids)

    if by_owner:
        # Shielded: a disconnect cancels this task while it is cleaning up.
        await asyncio.shield(asyncio.gather(*(release(owner, ids) for owner, ids in by_owner.items())))


@dataclass(slots=True)
class _Progress:
    """What a request has streamed so far, choice by choice."""

    request: Request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)

    def record(self, chunks: tuple[TokenChunk, ...]) -> None:
        for chunk in chunks:
            self.tokens.setdefault(chunk.choice, []).extend(chunk.token_ids)
            if chunk.finish_reason is not None:
                self.finished.add(chunk.choice)

    def next_request(self) -> Request | None:
        """What to run next: the whole request until its first token, then one open choice after the other."""
        if not self.tokens:
            return self.request
        first = self.request.first_choice
        for choice in range(first, first + self.request.sampling.n):
            if choice not in self.finished:
                before = list(self.request.output_token_ids)
                return self.request.resume_choice(choice, before + self.tokens.get(choice, []))
        return None


async def generate(
    request: Request,
    payloads: Mapping[int, bytes],
    place: Place,
    client_of: ClientOf,
    options: LifeOptions = LifeOptions(),
) -> AsyncGenerator[Update]:
    """Place a request, run it, and yield its tokens; place it again when a replica fails.

    ``place`` gets the replicas that failed this request and raises when there is nowhere to go. A request that a
    replica gave back does not count as a failed attempt. Raises ``EpdError``: the first failure that is the request's
    own fault, or the last of the attempts; ``DeadlineExceededError`` when the deadline passes.
    """
    progress = _Progress(request)
    excluded: frozenset[str] = frozenset()
    num_failures = num_placements = 0
    while (part := progress.next_request()) is not None:
        _check_deadline(request)
        placement = place(part, excluded)
        num_placements += 1
        reassign = partial(_encoder_instead, place, part, excluded)
        left = replace(options, max_attempts=options.max_attempts - num_failures)
        life = run_stages(part, placement, client_of, payloads, reassign, left)
        stages = _until_deadline(life, request)
        try:
            async with contextlib.aclosing(stages):
                async for chunks, as_run in stages:
                    progress.record(chunks)
                    yield Update(chunks, as_run, num_placements)
        except LegFailed as failure:
            if isinstance(failure.error, RequestReturnedError):
                continue
            if not isinstance(failure.error, StageFailedError | TransferError):
                raise failure.error from None
            num_failures += failure.num_failures
            if num_failures >= options.max_attempts:
                raise _as_stage_failure(failure) from failure.error
            excluded |= {failure.replica_id}


def _encoder_instead(
    place: Place, request: Request, excluded: frozenset[str], index: int, failed: frozenset[str]
) -> str:
    """Place a request again, for the sake of who would then encode one item."""
    return place(request, excluded | failed).encode[index]


def _check_deadline(request: Request) -> None:
    if request.deadline_s is not None and time.time() >= request.deadline_s:
        raise DeadlineExceededError("the request's deadline passed before it finished")


async def _until_deadline(stream: AsyncGenerator[T], request: Request) -> AsyncGenerator[T]:
    """Pass a stream on, and end it with ``DeadlineExceededError`` when the deadline passes between two items."""
    async with contextlib.aclosing(stream) as items:
        if request.deadline_s is None:
            async for item in items:
                yield item
            return
        with _Alarm(request.deadline_s) as alarm:
            while (next_item := await alarm.next_of(items)) is not None:
                yield next_item


class _Alarm:
    """Interrupts what a task waits for when a moment comes. One timer serves a whole stream, whereas
    ``asyncio.timeout`` would set one for each of its tokens."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._has_rung = False
        self._waiting: asyncio.Task[object] | None = None

    def __enter__(self) -> _Alarm:
        self._timer = asyncio.get_running_loop().call_later(max(0.0, self._deadline_s - time.time()), self._ring)
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def _ring(self) -> None:
        self._has_rung = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def next_of(self, items: AsyncGenerator[T]) -> T | None:
        """Return the next item, or ``None`` at the end. Raises ``DeadlineExceededError`` when the alarm rings first."""
        task = asyncio.current_task()
        assert task is not None
        num_cancellations = task.cancelling()
        try:
            if not self._has_rung:
                self._waiting = task
                return await anext(items, None)
        except asyncio.CancelledError:
            # Another's cancellation at the same moment goes before ours.
            if not self._has_rung or task.uncancel() > num_cancellations:
                raise
        finally:
            self._waiting = None
        raise DeadlineExceededError("the request's deadline passed before it finished")


def _as_stage_failure(failure: LegFailed) -> EpdError:
    if isinstance(failure.error, StageFailedError):
        return failure.error
    return StageFailedError("transfer", failure.error.message)
