"""The life of a request: encode -> prefill -> decode over replicas, in one function; and what happens when one fails.

    bytes ──> encode ──EmbeddingHandle──> prefill ──KVHandle──> decode ──> tokens
              (0..k replicas)             (1 replica)           (1 replica, often the same)

``run_stages`` is the undisturbed life. ``generate`` drives it, and places what is left of a request again when a
replica fails or gives it back: encode and prefill can be repeated, and a decode goes on after the tokens that were
already streamed. Knows nothing of HTTP, text, or how a client reaches a replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from epd.errors import (
    DeadlineExceededError,
    EpdError,
    RequestReturnedError,
    StageFailedError,
    TransferError,
)
from epd.types import (
    EmbeddingHandle,
    Handle,
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


class _LegFailed(Exception):  # noqa: N818 - internal: says which replica failed, and is unwrapped before it leaves
    def __init__(self, replica_id: str, error: EpdError) -> None:
        super().__init__(replica_id, error)
        self.replica_id = replica_id
        self.error = error


async def run_stages(
    request: Request, placement: Placement, client_of: ClientOf, payloads: Mapping[int, bytes]
) -> AsyncGenerator[tuple[TokenChunk, ...]]:
    """Yield the output tokens of one placed request.

    Adjacent stages on the same replica are one call to it. Whatever the stages hold for one another is released on
    every way out. Raises ``_LegFailed``.
    """
    claims: list[Handle] = []
    try:
        prompt, report = await _encode(request, placement, client_of, payloads, claims)
        local = {index: payload for index, payload in payloads.items() if not _is_apart(placement, index)}
        source: Prompt | Prefilled = prompt
        if placement.decode != placement.prefill:
            with _blame(placement.prefill):
                source = await client_of(placement.prefill).prefill(request, prompt, local)
            claims[:] = [] if source.kv is None else [source.kv]
            report = report + source.report
            yield _with_report(source.first_tokens, report)
            if source.kv is None:
                return
            local, report = {}, StageReport()
        with _blame(placement.decode):
            async with contextlib.aclosing(client_of(placement.decode).decode(request, source, local)) as stream:
                async for chunks in stream:
                    claims.clear()
                    yield _with_report(chunks, report)
                    report = StageReport()
    finally:
        await _release(claims, client_of)


def _is_apart(placement: Placement, index: int) -> bool:
    return bool(placement.encode) and placement.encode[index] != placement.prefill


async def _encode(
    request: Request,
    placement: Placement,
    client_of: ClientOf,
    payloads: Mapping[int, bytes],
    claims: list[Handle],
) -> tuple[Prompt, StageReport]:
    """Encode the items that are placed apart, each replica's in one call, all at once; fill ``claims``.

    The first failure cancels the other calls.
    """
    shares: dict[str, dict[int, bytes]] = defaultdict(dict)
    for item in request.items:
        if _is_apart(placement, item.index):
            shares[placement.encode[item.index]][item.index] = payloads[item.index]
    handles: list[EmbeddingHandle | None] = [None] * len(request.items)
    report = StageReport()

    async def encode(replica_id: str, share: Mapping[int, bytes]) -> None:
        nonlocal report
        with _blame(replica_id):
            encoded = await client_of(replica_id).encode(request, share)
        claims.extend(encoded.handles)
        report = report + encoded.report
        for index, handle in zip(share, encoded.handles, strict=True):
            handles[index] = handle

    try:
        async with asyncio.TaskGroup() as group:
            for replica_id, share in shares.items():
                group.create_task(encode(replica_id, share))
    except* (_LegFailed, EpdError) as errors:
        raise errors.exceptions[0] from None
    return Prompt(tuple(handles)), report


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
        raise _LegFailed(replica_id, error) from error


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
    *,
    max_attempts: int = 3,
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
        stages = _until_deadline(run_stages(part, placement, client_of, payloads), request)
        try:
            async with contextlib.aclosing(stages):
                async for chunks in stages:
                    progress.record(chunks)
                    yield Update(chunks, placement, num_placements)
        except _LegFailed as failure:
            if isinstance(failure.error, RequestReturnedError):
                continue
            if not isinstance(failure.error, StageFailedError | TransferError):
                raise failure.error from None
            num_failures += 1
            if num_failures >= max_attempts:
                raise _as_stage_failure(failure) from failure.error
            excluded |= {failure.replica_id}


def _check_deadline(request: Request) -> None:
    if request.deadline_s is not None and time.time() >= request.deadline_s:
        raise DeadlineExceededError("the request's deadline passed before it finished")


async def _until_deadline(
    stream: AsyncGenerator[tuple[TokenChunk, ...]], request: Request
) -> AsyncGenerator[tuple[TokenChunk, ...]]:
    """Pass a stream on, and end it with ``DeadlineExceededError`` when the deadline passes between two items."""
    async with contextlib.aclosing(stream) as items:
        if request.deadline_s is None:
            async for chunks in items:
                yield chunks
            return
        with _Alarm(request.deadline_s) as alarm:
            while (next_chunks := await alarm.next_of(items)) is not None:
                yield next_chunks


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


def _as_stage_failure(failure: _LegFailed) -> EpdError:
    if isinstance(failure.error, StageFailedError):
        return failure.error
    return StageFailedError("transfer", failure.error.message)
