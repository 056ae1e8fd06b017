"""If these fail, a benchmark reports numbers that are not what they are called, and topologies are chosen by them."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from epd.bench.metrics import (
    Distribution,
    MaxGoodput,
    RequestMetrics,
    RequestTimeline,
    attainment,
    max_goodput,
    percentile,
    request_goodput,
    summarize,
)
from epd.bench.report import as_json, max_goodput_table, summary_table
from epd.types import SLO

SLO_1S = SLO(ttft_s=1.0, itl_s=0.1)


def log(*token_at_s: float, due_at_s: float = 0.0, num_output_tokens: int = 0, **more: object) -> RequestTimeline:
    values = {"index": 0, "contender": "auto", "sent_at_s": due_at_s, "ended_at_s": 99.0, "status": 200, **more}
    return RequestTimeline(
        due_at_s=due_at_s,
        token_at_s=token_at_s,
        num_output_tokens=num_output_tokens or len(token_at_s),
        **values,  # type: ignore[arg-type]
    )


REJECTED = log(status=429, error="HTTP 429: busy")
FAILED = log(0.1, error="ReadError: gone")


def test_figures_of_one_request_follow_their_definitions() -> None:
    metrics = RequestMetrics.of(log(10.5, 10.6, 10.9, 11.0, due_at_s=10.0))
    assert metrics.ttft_s == pytest.approx(0.5)
    assert metrics.e2e_s == pytest.approx(1.0)
    assert metrics.tpot_s == pytest.approx(0.5 / 3)
    assert metrics.gaps_s == pytest.approx((0.1, 0.3, 0.1))
    assert metrics.max_stall_s == pytest.approx(0.3)


def test_ttft_counts_from_when_the_request_was_due_not_from_when_the_client_got_to_it() -> None:
    assert RequestMetrics.of(log(2.0, due_at_s=1.0, sent_at_s=1.9)).ttft_s == pytest.approx(1.0)


def test_tokens_that_arrive_together_have_gaps_of_zero() -> None:
    metrics = RequestMetrics.of(log(1.0, 1.3, num_output_tokens=4))
    assert sorted(metrics.gaps_s) == pytest.approx([0.0, 0.0, 0.3])
    assert metrics.tpot_s == pytest.approx(0.1)


def test_a_single_token_has_no_tpot_and_no_gap() -> None:
    metrics = RequestMetrics.of(log(0.4))
    assert (metrics.tpot_s, metrics.gaps_s, metrics.itl_p99_s, metrics.max_stall_s) == (None, (), 0.0, 0.0)
    assert metrics.meets(SLO_1S)


@pytest.mark.parametrize(
    ("timeline", "is_met"),
    [
        (log(0.9, 0.95, 1.0), True),
        (log(1.1, 1.15), False),
        (log(0.5, 0.55, 0.8), False),
        # One stall in 500 gaps is beyond the p99, one in three is not.
        (log(0.5, *(0.7 + 0.01 * i for i in range(500))), True),
    ],
)
def test_a_request_meets_its_slo_by_ttft_and_by_its_own_p99_gap(timeline: RequestTimeline, is_met: bool) -> None:
    assert RequestMetrics.of(timeline).meets(SLO_1S) == is_met


def test_rejected_and_failed_requests_count_as_missed_in_attainment_and_goodput() -> None:
    timelines = [log(0.5, 0.55), log(0.6, 0.65), log(3.0), REJECTED, FAILED]
    assert attainment(timelines, SLO_1S) == pytest.approx(0.4)
    assert request_goodput(timelines, SLO_1S, duration_s=4.0) == pytest.approx(0.5)
    assert attainment([], SLO_1S) == 0.0


def test_a_summary_tells_complete_rejected_and_failed_apart() -> None:
    traced = log(0.5, 0.55, mode="epd", trace={"timings_ms": {"encode": 20, "prefill": 4}})
    other = log(0.7, 0.95, due_at_s=0.1, mode="epd", trace={"timings_ms": {"encode": 40}})
    summary = summarize("auto", [traced, other, REJECTED, FAILED], SLO_1S, duration_s=2.0)
    assert (summary.num_offered, summary.num_complete, summary.num_rejected, summary.num_failed) == (4, 2, 1, 1)
    assert summary.offered_rate == 2.0
    assert summary.attainment == 0.25
    assert summary.goodput == pytest.approx(summary.offered_rate * summary.attainment)
    assert summary.itl_violations == 0.5
    assert summary.ttft.p50_s == pytest.approx(0.55)
    assert summary.itl.num_values == 2
    assert summary.output_tokens_per_s == pytest.approx(2.0)
    assert summary.modes == {"epd": 2}
    assert summary.stages_ms == {"encode": 30.0, "prefill": 4.0}


def test_a_summary_of_nothing_but_failures_is_all_zero() -> None:
    summary = summarize("auto", [FAILED, REJECTED], SLO_1S, duration_s=1.0)
    assert summary.goodput == summary.attainment == summary.output_tokens_per_s == summary.itl_violations == 0.0
    assert summary.ttft == Distribution()


def test_percentiles_are_linear_between_neighbours() -> None:
    assert percentile([0.0, 1.0], 50) == pytest.approx(0.5)
    assert percentile([5.0], 99) == 5.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 5.0), min_size=1, max_size=40), st.floats(0.01, 3.0), st.floats(0.01, 1.0))
def test_a_looser_slo_is_never_met_less_often(gaps_s: list[float], ttft_s: float, itl_s: float) -> None:
    times = [sum(gaps_s[: index + 1]) for index in range(len(gaps_s))]
    metrics = RequestMetrics.of(log(*times))
    if metrics.meets(SLO(ttft_s, itl_s)):
        assert metrics.meets(SLO(2 * ttft_s, itl_s))
        assert metrics.meets(SLO(ttft_s, 2 * itl_s))


# -- max goodput


@pytest.mark.parametrize("capacity", [0.3, 1.0, 3.3, 17.0])
async def test_the_search_finds_the_highest_rate_that_holds(capacity: float) -> None:
    async def measure(rate: float) -> float:
        return 0.95 if rate <= capacity else 0.5

    result = await max_goodput(measure, start_rate=1.0, tolerance=0.05, max_steps=20)
    assert capacity * 0.94 <= result.rate <= capacity
    assert result.goodput == pytest.approx(result.rate * 0.95)
    assert len(result.tried) == len(set(result.tried)) <= 12


async def test_a_server_that_never_holds_has_no_goodput() -> None:
    async def measure(rate: float) -> float:
        return 0.1

    result = await max_goodput(measure, start_rate=1.0, max_steps=4)
    assert (result.rate, result.goodput) == (0.0, 0.0)
    assert [rate for rate, _ in result.tried] == [1.0, 0.5, 0.25, 0.125]


# -- report


def test_the_table_names_every_contender_and_the_losers_too() -> None:
    summaries = [
        summarize("auto", [log(0.5, 0.55)], SLO_1S, 1.0),
        summarize("aggregated", [log(3.0, 3.5), REJECTED], SLO_1S, 1.0),
    ]
    output = io.StringIO()
    console = Console(width=200, file=output)
    console.print(summary_table(summaries, SLO_1S))
    console.print(max_goodput_table({"auto": MaxGoodput(2.0, 1.9, ((1.0, 1.0), (2.0, 0.95)))}))
    text = output.getvalue()
    for expected in ("auto", "aggregated", "100.0%", "0.0%", "500.0 / 500.0", "2.00: 95%"):
        assert expected in text


def test_the_json_report_has_all_figures_as_plain_data() -> None:
    summary = summarize("auto", [log(0.5, 0.55)], SLO_1S, 1.0)
    report = as_json([summary], SLO_1S, workload={"name": "fixed"}, max_goodputs={"auto": MaxGoodput(1, 1, ())})
    assert report["summaries"][0]["ttft"]["p99_s"] == pytest.approx(0.5)
    assert report["slo"] == {"ttft_s": 1.0, "itl_s": 0.1}
    assert report["max_goodput"]["auto"]["rate"] == 1
