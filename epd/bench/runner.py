"""Run a load test: contenders side by side, interleaved, on equal work.

Owns the order of runs. A machine drifts over minutes (neighbours, heat, caches), so each rate is split into rounds and
every contender runs once a round, in rotating order, instead of one after the other. In a round all contenders get the
same arrivals and sizes, but different words and pixels, so none profits from what another left in a cache. Knows
nothing of terminals.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx

from epd.bench.client import Contender, Due, run_open_loop, send
from epd.bench.metrics import MaxGoodput, RequestTimeline, Summary, attainment, max_goodput, summarize
from epd.bench.workload import WorkItem, Workload, request_body
from epd.errors import EpdError
from epd.types import SLO

WorkloadOf = Callable[[float, int], Workload]
"""Draws a workload from (rate, seed)."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to run. ``start_rate`` of ``None`` skips the search for max goodput."""

    contenders: tuple[Contender, ...]
    workload_of: WorkloadOf
    slo: SLO
    rates: tuple[float, ...]
    num_rounds: int = 1
    num_warmup: int = 2
    seed: int = 0
    start_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """What a run tells while it goes on: a label, and requests finished out of those of the current piece."""

    label: str
    num_done: int
    num_total: int


@dataclass(slots=True)
class BenchResult:
    summaries: list[Summary] = field(default_factory=list)
    max_goodputs: dict[str, MaxGoodput] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    timelines: list[RequestTimeline] = field(default_factory=list)


async def run_bench(
    client: httpx.AsyncClient, plan: BenchPlan, on_progress: Callable[[Progress], None] = lambda progress: None
) -> BenchResult:
    """Warm up, run all rates, then search for max goodput. Raises ``EpdError`` if a contender fails its warm-up."""
    result = BenchResult()
    for contender in plan.contenders:
        await _warm_up(client, contender, plan)
    for rate in plan.rates:
        logs: dict[str, list[RequestTimeline]] = {contender.name: [] for contender in plan.contenders}
        duration_s = 0.0
        for round_index in range(plan.num_rounds):
            workload = plan.workload_of(rate, plan.seed + round_index)
            duration_s += workload.duration_s
            shift = round_index % len(plan.contenders)
            for contender in plan.contenders[shift:] + plan.contenders[:shift]:
                label = f"{contender.name} at {rate:g} req/s, round {round_index + 1} of {plan.num_rounds}"
                logs[contender.name] += await _run(client, contender, workload, label, on_progress)
        for name, timelines in logs.items():
            if timelines:
                result.summaries.append(summarize(name, timelines, plan.slo, duration_s))
            result.timelines += timelines
    if plan.start_rate is not None:
        for contender in plan.contenders:
            result.max_goodputs[contender.name] = await _search(client, contender, plan, plan.start_rate, on_progress)
    for timeline in result.timelines:
        if timeline.error:
            result.errors[f"{timeline.contender}: {timeline.error}"] += 1
    return result


async def _warm_up(client: httpx.AsyncClient, contender: Contender, plan: BenchPlan) -> None:
    items = plan.workload_of(plan.rates[0], plan.seed + plan.num_rounds).items[: plan.num_warmup]
    for item in items:
        timeline = await send(client, contender, _due(item, contender, "warm-up"))
        if timeline.error:
            raise EpdError(f"{contender.name} at {contender.base_url} failed its warm-up: {timeline.error}")


async def _search(
    client: httpx.AsyncClient,
    contender: Contender,
    plan: BenchPlan,
    start_rate: float,
    on_progress: Callable[[Progress], None],
) -> MaxGoodput:
    async def measure(rate: float) -> float:
        workload = plan.workload_of(rate, plan.seed)
        label = f"{contender.name}: max goodput, trying {rate:.3g} req/s"
        return attainment(await _run(client, contender, workload, label, on_progress), plan.slo)

    return await max_goodput(measure, start_rate=start_rate)


async def _run(
    client: httpx.AsyncClient,
    contender: Contender,
    workload: Workload,
    label: str,
    on_progress: Callable[[Progress], None],
) -> list[RequestTimeline]:
    on_progress(Progress(label, 0, len(workload.items)))
    requests = await asyncio.to_thread(_prepare, workload.items, contender, f"{label} {workload.seed}")
    num_done = 0

    def count(timeline: RequestTimeline) -> None:
        nonlocal num_done
        num_done += 1
        on_progress(Progress(label, num_done, len(requests)))

    return await run_open_loop(client, contender, requests, on_done=count)


def _prepare(items: Sequence[WorkItem], contender: Contender, label: str) -> list[Due]:
    return [_due(item, contender, label) for item in items]


def _due(item: WorkItem, contender: Contender, label: str) -> Due:
    salt = zlib.crc32(f"{contender.name} {label}".encode())
    body = request_body(item, model=contender.model, salt=salt, options=contender.options)
    return Due(item.index, item.due_s, body)
