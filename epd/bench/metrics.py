"""What a load test measured: one token-timestamp log a request, and every figure derived from it.

Owns the definitions, which are the same wherever this project reports a number:

* **TTFT** from the moment the request was *due* to its first token. In an open-loop test a late send counts against the
  server under test as much as a late answer would for a user, so the client's own lag is never hidden (it is reported).
* **ITL** each gap between consecutive tokens. Tokens that arrive together have gaps of zero.
* **TPOT** (E2E - TTFT) / (output tokens - 1), one value a request.
* **attainment** the share of *offered* requests that meet every objective; rejected and failed ones count as missed.
* **goodput** offered rate times attainment. **max goodput** the highest offered rate with attainment of at least 90 %.

A request meets its ITL objective when its own p99 gap is within it. Knows nothing of HTTP or of how load is made.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from epd.types import SLO

ATTAINMENT_TARGET = 0.9


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """The log of one request, on the client's clock.

    ``token_at_s`` holds one time a received chunk of text; ``num_output_tokens`` is the server's own count, which is
    larger when a chunk carried several tokens. ``status`` is the HTTP status, 0 if there was no answer. ``trace`` is
    the server's ``epd`` object, if it sent one.
    """

    index: int
    contender: str
    due_at_s: float
    sent_at_s: float
    ended_at_s: float
    token_at_s: tuple[float, ...] = ()
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    status: int = 0
    error: str = ""
    mode: str = ""
    trace: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    @property
    def is_complete(self) -> bool:
        return not self.error and bool(self.token_at_s)

    @property
    def is_rejected(self) -> bool:
        return self.status == 429


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The figures of one complete request. ``tpot_s`` is ``None`` for a single token."""

    ttft_s: float
    e2e_s: float
    gaps_s: tuple[float, ...]
    tpot_s: float | None

    @property
    def itl_p99_s(self) -> float:
        return percentile(self.gaps_s, 99) if self.gaps_s else 0.0

    @property
    def max_stall_s(self) -> float:
        return max(self.gaps_s, default=0.0)

    def meets(self, slo: SLO) -> bool:
        return self.ttft_s <= slo.ttft_s and self.itl_p99_s <= slo.itl_s

    @staticmethod
    def of(timeline: RequestTimeline) -> RequestMetrics:
        """Derive the figures of a complete request. E2E ends with the last token, not with the connection."""
        times = timeline.token_at_s
        num_tokens = max(timeline.num_output_tokens, len(times))
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        gaps += [0.0] * (num_tokens - len(times))
        ttft_s, e2e_s = times[0] - timeline.due_at_s, times[-1] - timeline.due_at_s
        tpot_s = (e2e_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else None
        return RequestMetrics(ttft_s, e2e_s, tuple(gaps), tpot_s)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, linear between neighbours. Raises ``ValueError`` for no values."""
    if not len(values):
        raise ValueError("no values")
    return float(np.percentile(values, percent))


@dataclass(frozen=True, slots=True)
class Distribution:
    """Percentiles of one figure in seconds; all 0 when there was nothing to measure."""

    num_values: int = 0
    mean_s: float = 0.0
    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0

    @staticmethod
    def of(values: Sequence[float]) -> Distribution:
        if not values:
            return Distribution()
        p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
        return Distribution(len(values), float(np.mean(values)), p50, p90, p99, float(max(values)))


@dataclass(frozen=True, slots=True)
class Summary:
    """One contender at one offered rate. Latencies are those of complete requests; ``attainment`` is over all."""

    contender: str
    offered_rate: float
    num_offered: int
    num_complete: int
    num_rejected: int
    num_failed: int
    attainment: float
    goodput: float
    output_tokens_per_s: float
    itl_violations: float
    """Share of complete requests whose own p99 gap is over the ITL objective."""
    ttft: Distribution
    itl: Distribution
    tpot: Distribution
    e2e: Distribution
    max_stall: Distribution
    send_lag: Distribution
    modes: Mapping[str, int]
    """How many complete requests ran in each mode, as the server reported."""
    stages_ms: Mapping[str, float]
    """Mean of the server's own stage timings over the requests that carried a trace, in milliseconds."""


def attainment(timelines: Sequence[RequestTimeline], slo: SLO) -> float:
    """Return the share of the offered requests that meet every objective; 0 if none was offered."""
    if not timelines:
        return 0.0
    return sum(meets_slo(timeline, slo) for timeline in timelines) / len(timelines)


def meets_slo(timeline: RequestTimeline, slo: SLO) -> bool:
    return timeline.is_complete and RequestMetrics.of(timeline).meets(slo)


def request_goodput(timelines: Sequence[RequestTimeline], slo: SLO, duration_s: float) -> float:
    """Return the requests per second that meet every objective, over the time in which requests were offered."""
    return sum(meets_slo(timeline, slo) for timeline in timelines) / duration_s


def summarize(contender: str, timelines: Sequence[RequestTimeline], slo: SLO, duration_s: float) -> Summary:
    """Derive all figures of one contender from its logs; ``duration_s`` is the time in which requests were offered."""
    complete = [timeline for timeline in timelines if timeline.is_complete]
    metrics = [RequestMetrics.of(timeline) for timeline in complete]
    num_rejected = sum(timeline.is_rejected for timeline in timelines)
    modes: dict[str, int] = {}
    stages: dict[str, list[float]] = {}
    for timeline in complete:
        if timeline.mode:
            modes[timeline.mode] = modes.get(timeline.mode, 0) + 1
        for name, value_ms in (timeline.trace.get("timings_ms") or {}).items():
            stages.setdefault(name, []).append(float(value_ms))
    num_tokens = sum(max(timeline.num_output_tokens, len(timeline.token_at_s)) for timeline in complete)
    violations = sum(each.itl_p99_s > slo.itl_s for each in metrics)
    return Summary(
        contender=contender,
        offered_rate=len(timelines) / duration_s,
        num_offered=len(timelines),
        num_complete=len(complete),
        num_rejected=num_rejected,
        num_failed=len(timelines) - len(complete) - num_rejected,
        attainment=attainment(timelines, slo),
        goodput=request_goodput(timelines, slo, duration_s),
        output_tokens_per_s=num_tokens / _busy_s(complete, duration_s),
        itl_violations=violations / len(metrics) if metrics else 0.0,
        ttft=Distribution.of([each.ttft_s for each in metrics]),
        itl=Distribution.of([gap for each in metrics for gap in each.gaps_s]),
        tpot=Distribution.of([each.tpot_s for each in metrics if each.tpot_s is not None]),
        e2e=Distribution.of([each.e2e_s for each in metrics]),
        max_stall=Distribution.of([each.max_stall_s for each in metrics]),
        send_lag=Distribution.of([timeline.sent_at_s - timeline.due_at_s for timeline in timelines]),
        modes=modes,
        stages_ms={name: float(np.mean(values)) for name, values in stages.items()},
    )


def _busy_s(complete: Sequence[RequestTimeline], duration_s: float) -> float:
    """Return the time that output tokens took to arrive: the offered time, or longer if the last answers came late."""
    if not complete:
        return duration_s
    first_due_s = min(timeline.due_at_s for timeline in complete)
    return max(duration_s, max(timeline.token_at_s[-1] for timeline in complete) - first_due_s)


@dataclass(frozen=True, slots=True)
class MaxGoodput:
    """The highest rate that held, its goodput, and what was tried, as (offered rate, attainment) in order."""

    rate: float
    goodput: float
    tried: tuple[tuple[float, float], ...]


async def max_goodput(
    measure: Callable[[float], Awaitable[float]],
    *,
    start_rate: float,
    tolerance: float = 0.05,
    max_steps: int = 10,
) -> MaxGoodput:
    """Bisect for the highest offered rate with attainment of at least 90 %.

    ``measure`` runs one rate and returns its attainment. Doubles from ``start_rate`` until a rate fails, then halves
    the bracket until it is within ``tolerance`` of its upper end. After ``max_steps`` rates the best so far stands.
    """
    tried: list[tuple[float, float]] = []
    good, bad = 0.0, math.inf
    rate = start_rate
    while len(tried) < max_steps and (bad == math.inf or bad - good > tolerance * bad):
        share = await measure(rate)
        tried.append((rate, share))
        if share >= ATTAINMENT_TARGET:
            good = rate
        else:
            bad = rate
        rate = 2 * rate if bad == math.inf else (good + bad) / 2
    best = max((entry for entry in tried if entry[1] >= ATTAINMENT_TARGET), default=(0.0, 0.0))
    return MaxGoodput(best[0], best[0] * best[1], tuple(tried))
