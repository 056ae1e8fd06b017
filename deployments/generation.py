"""One prompt's generation, from tokens to text: drives the life of a request and turns its chunks into deltas.

Owns detokenizing, stop strings, and the request's timeline at the ingress. Knows nothing of HTTP bodies or Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

from epd.errors import EpdError
from epd.prompt.detokenizer import IncrementalDetokenizer
from epd.stages.life import ClientOf, LifeOptions, Place, Update, generate
from epd.types import FinishReason, Placement, Request, StageReport, TokenChunk, TokenLogprob

END_TIMEOUT_S = 2.0
"""How long a reply waits for a stream to end whose tokens have all arrived."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained. ``text`` may be empty while text is held back."""

    choice: int
    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to be placed: what the stages get, and what it took to get there."""

    request: Request
    payloads: Mapping[int, bytes]
    report: StageReport
    make_text: Callable[[], IncrementalDetokenizer]


@dataclass(slots=True)
class Timeline:
    """When things happened to a request at the ingress, on the monotonic clock."""

    received_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def ttft_s(self) -> float:
        return 0.0 if self.first_token_s is None else self.first_token_s - self.received_s


@dataclass(slots=True)
class Generation:
    """One run. After ``deltas`` is exhausted, the other fields tell how it went."""

    prepared: Prepared
    timeline: Timeline
    placement: Placement | None = None
    num_attempts: int = 0
    num_output_tokens: int = 0
    report: StageReport = field(default_factory=StageReport)
    is_complete: bool = False

    async def deltas(
        self,
        place: Place,
        client_of: ClientOf,
        *,
        options: LifeOptions = LifeOptions(),  # noqa: B008 - immutable
        clock: Callable[[], float] = time.monotonic,
    ) -> AsyncGenerator[tuple[Delta, ...]]:
        """Yield what the choices gain until all have ended. Leaving early aborts every stage.

        A run that ends by itself is read to its end, so that replicas finish it in their own way and say how busy they
        are then; one that a stop string ended is cut off.
        """
        request = self.prepared.request
        self.report = self.prepared.report
        texts = {choice: self.prepared.make_text() for choice in range(request.sampling.n)}
        is_open, is_running = set(texts), set(texts)
        updates = generate(request, self.prepared.payloads, place, client_of, options)
        async with contextlib.aclosing(updates):
            async for update in updates:
                self._note(update, clock())
                is_running -= {chunk.choice for chunk in update.chunks if chunk.finish_reason is not None}
                deltas = []
                for chunk in joined(update.chunks):
                    if chunk.choice in is_open:
                        deltas.append(self._delta(chunk, texts[chunk.choice]))
                        if deltas[-1].finish_reason is not None:
                            is_open.remove(chunk.choice)
                yield tuple(deltas)
                if not is_open:
                    break
            self.is_complete = True
            if not is_running:
                await _read_to_end(updates)

    def _note(self, update: Update, now_s: float) -> None:
        self.placement = update.placement
        self.num_attempts = update.num_attempts
        for chunk in update.chunks:
            if chunk.report is not None:
                self.report = self.report + chunk.report
        if any(chunk.token_ids for chunk in update.chunks):
            if self.timeline.first_token_s is None:
                self.timeline.first_token_s = now_s
            self.timeline.last_token_s = now_s

    def _delta(self, chunk: TokenChunk, text: IncrementalDetokenizer) -> Delta:
        # The token that ended a choice counts as output and is no part of the text.
        shown = chunk.token_ids[:-1] if chunk.finish_reason is FinishReason.STOP else chunk.token_ids
        num_before = text.num_tokens
        gained = text.push(shown)
        finish_reason, num_tokens = chunk.finish_reason, len(chunk.token_ids)
        if text.stopped:
            finish_reason, num_tokens = FinishReason.STOP, text.num_tokens - num_before
        elif finish_reason is not None:
            gained += text.finish()
            if text.stopped:
                finish_reason = FinishReason.STOP
        self.num_output_tokens += num_tokens
        return Delta(chunk.choice, gained, num_tokens, finish_reason, chunk.logprobs[:num_tokens])


def joined(chunks: tuple[TokenChunk, ...]) -> tuple[TokenChunk, ...]:
    """Join chunks of the same choice that came together: clients look for one entry a choice in an event."""
    if len(chunks) == 1:
        return chunks
    by_choice: dict[int, TokenChunk] = {}
    for chunk in chunks:
        before = by_choice.get(chunk.choice)
        if before is not None:
            token_ids, logprobs = before.token_ids + chunk.token_ids, before.logprobs + chunk.logprobs
            chunk = TokenChunk(chunk.choice, token_ids, chunk.finish_reason, logprobs)
        by_choice[chunk.choice] = chunk
    return tuple(by_choice.values())


async def _read_to_end(updates: AsyncGenerator[Update]) -> None:
    """Wait for a stream that has brought every token to end; the request is done, whatever goes wrong with that."""
    with contextlib.suppress(EpdError, TimeoutError):
        async with asyncio.timeout(END_TIMEOUT_S):
            async for _ in updates:
                pass
