"""One request and its reply: runs the prompts of a body side by side, times them, and sums up how they went.

Knows nothing of HTTP; ``deployments.service`` writes what comes out of here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from deployments.generation import Delta, Generation, Prepared, Timeline
from deployments.metrics import IngressMetrics
from deployments.placing import Placer
from deployments.replies import Usage
from deployments.trace import trace_object
from epd.stages.life import ClientOf, LifeOptions
from epd.types import SLO, Mode

NOT_PLACED = "none"

OpenClients = Callable[[], contextlib.AbstractContextManager[ClientOf]]
"""Open the way to the replicas for one exchange; what is held for it meanwhile is given back on leaving."""


@dataclass(frozen=True, slots=True)
class Wish:
    """How a client wants its request placed."""

    mode: Mode
    slo: SLO


@dataclass(slots=True)
class Exchange:
    """``deltas`` may be iterated once; the properties are complete when it has ended, or ``num_open`` is 0."""

    prepared: Sequence[Prepared]
    wish: Wish
    timeline: Timeline
    placer: Placer
    metrics: IngressMetrics
    options: LifeOptions
    clock: Callable[[], float] = time.monotonic
    generations: list[Generation] = field(init=False)
    num_open: int = field(init=False)
    _last_token_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generations = [Generation(each, replace(self.timeline)) for each in self.prepared]
        self.num_open = self.num_choices

    @property
    def num_choices(self) -> int:
        return sum(each.request.sampling.n for each in self.prepared)

    @property
    def mode(self) -> str:
        """The mode that ran; of several prompts, the first one's."""
        placement = self.generations[0].placement
        return NOT_PLACED if placement is None else placement.mode.value

    @property
    def usage(self) -> Usage:
        return Usage(
            sum(each.request.num_prompt_tokens for each in self.prepared),
            sum(each.num_output_tokens for each in self.generations),
            sum(each.report.cached.get("prefix_tokens", 0) for each in self.generations),
        )

    @property
    def trace(self) -> dict[str, Any] | list[dict[str, Any]]:
        """The ``epd`` object of the reply; with several prompts, one for each."""
        traces = [
            trace_object(each.placement, each.report, ttft_s=each.timeline.ttft_s, num_attempts=each.num_attempts)
            for each in self.generations
            if each.placement is not None
        ]
        return traces[0] if len(self.generations) == 1 else traces

    async def deltas(self, open_clients: OpenClients) -> AsyncGenerator[list[Delta]]:
        """Yield what the choices of all prompts gain, numbered through; never empty. Leaving early aborts all."""
        await self.placer.ready()
        with open_clients() as client_of:
            first_choice, streams = 0, []
            for generation in self.generations:
                streams.append(self._deltas_of(generation, first_choice, client_of))
                first_choice += generation.prepared.request.sampling.n
            source = streams[0] if len(streams) == 1 else _interleaved(streams)
            async with contextlib.aclosing(source):
                async for deltas in source:
                    self.num_open -= sum(delta.finish_reason is not None for delta in deltas)
                    yield deltas
        self.metrics.finished(self.mode, self.clock() - self.timeline.received_s)

    async def _deltas_of(
        self, generation: Generation, first_choice: int, client_of: ClientOf
    ) -> AsyncGenerator[list[Delta]]:
        request = generation.prepared.request
        place = partial(self.placer.place, mode=self.wish.mode, slo=self.wish.slo)
        try:
            with self.placer.taking_in(request.request_id) as first_token:
                stream = generation.deltas(place, client_of, options=self.options, clock=self.clock)
                async with contextlib.aclosing(stream):
                    async for deltas in stream:
                        if generation.timeline.first_token_s is not None:
                            first_token()
                        numbered = list(deltas)
                        if first_choice:
                            numbered = [replace(delta, choice=first_choice + delta.choice) for delta in deltas]
                        self._measure(generation, numbered)
                        if numbered:
                            yield numbered
        finally:
            if generation.num_attempts > 1:
                self.metrics.resumed()
            ran = generation.placement if generation.is_complete else None
            self.placer.finished(request, ran, generation.report, generation.num_output_tokens)

    def _measure(self, generation: Generation, deltas: Sequence[Delta]) -> None:
        assert generation.placement is not None
        mode, now_s = generation.placement.mode.value, self.clock()
        for delta in deltas:
            if not delta.num_tokens:
                continue
            last_s = self._last_token_s.get(delta.choice)
            if last_s is None:
                self.metrics.first_token(mode, generation.timeline.ttft_s)
            else:
                self.metrics.next_tokens(mode, now_s - last_s, delta.num_tokens)
            self._last_token_s[delta.choice] = now_s


async def _interleaved(streams: Sequence[AsyncGenerator[list[Delta]]]) -> AsyncGenerator[list[Delta]]:
    """Yield the items of several streams as they come; the first failure ends them all."""
    ready: asyncio.Queue[list[Delta] | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[list[Delta]]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    ready.put_nowait(item)
        finally:
            ready.put_nowait(None)

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        num_running = len(pumps)
        while num_running:
            item = await ready.get()
            if item is not None:
                yield item
                continue
            num_running -= 1
            for pumping in pumps:
                if pumping.done():
                    pumping.result()
        await asyncio.gather(*pumps)
    finally:
        for pumping in pumps:
            pumping.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
