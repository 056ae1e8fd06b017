"""Turn summaries into a table for people and JSON for machines. Knows nothing of how they were measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from epd.bench.metrics import Distribution, MaxGoodput, Summary
from epd.types import SLO

SCHEMA_VERSION = 1


def summary_table(summaries: Sequence[Summary], slo: SLO) -> Table:
    """Return one column per contender and rate, so that a few fit a terminal; the best attainment of a rate in bold."""
    table = Table(title=f"SLO: TTFT {slo.ttft_s:g} s, ITL p99 {slo.itl_s * 1000:g} ms")
    table.add_column("p50 / p99 of complete requests")
    for each in summaries:
        table.add_column(f"{each.contender}\n{each.offered_rate:.2f} req/s", justify="right", no_wrap=True)
    best: dict[float, float] = {}
    for each in summaries:
        rate = round(each.offered_rate, 6)
        best[rate] = max(best.get(rate, 0.0), each.attainment)

    def attainment(each: Summary) -> str:
        is_best = each.attainment > 0 and each.attainment == best[round(each.offered_rate, 6)]
        return f"{'[bold]' if is_best else ''}{each.attainment:.1%}"

    def spread(figure: Distribution) -> str:
        return f"{figure.p50_s * 1000:.1f} / {figure.p99_s * 1000:.1f}"

    rows: list[tuple[str, Callable[[Summary], str]]] = [
        ("offered requests", lambda each: str(each.num_offered)),
        ("complete", lambda each: str(each.num_complete)),
        ("rejected (429)", lambda each: str(each.num_rejected)),
        ("failed", lambda each: str(each.num_failed)),
        ("TTFT ms", lambda each: spread(each.ttft)),
        ("ITL ms", lambda each: spread(each.itl)),
        ("TPOT ms", lambda each: spread(each.tpot)),
        ("E2E ms", lambda each: spread(each.e2e)),
        ("max stall ms", lambda each: spread(each.max_stall)),
        ("attainment", attainment),
        ("goodput req/s", lambda each: f"{each.goodput:.2f}"),
    ]
    for name, cell in rows:
        table.add_row(name, *(cell(each) for each in summaries))
    return table


def max_goodput_table(results: Mapping[str, MaxGoodput]) -> Table:
    """Return one row per contender: the highest rate that kept 90 % attainment, and what was tried."""
    table = Table(title="max goodput: highest offered rate with attainment of at least 90 %")
    table.add_column("contender")
    table.add_column("req/s", justify="right")
    table.add_column("goodput", justify="right")
    table.add_column("tried (rate: attainment)")
    for name, result in results.items():
        tried = ", ".join(f"{rate:.2f}: {share:.0%}" for rate, share in result.tried)
        table.add_row(name, f"{result.rate:.2f}", f"{result.goodput:.2f}", tried)
    return table


def as_json(
    summaries: Sequence[Summary],
    slo: SLO,
    *,
    workload: Mapping[str, Any],
    max_goodputs: Mapping[str, MaxGoodput] | None = None,
    errors: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the report as plain data. Latencies are in seconds; ``errors`` counts failures by message."""
    return {
        "schema_version": SCHEMA_VERSION,
        "slo": asdict(slo),
        "workload": dict(workload),
        "summaries": [asdict(each) for each in summaries],
        "max_goodput": {name: asdict(result) for name, result in (max_goodputs or {}).items()},
        "errors": dict(errors or {}),
    }
