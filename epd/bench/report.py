"""Turn summaries into a table for people and JSON for machines. Knows nothing of how they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from epd.bench.metrics import MaxGoodput, Summary
from epd.types import SLO

SCHEMA_VERSION = 1


def summary_table(summaries: Sequence[Summary], slo: SLO) -> Table:
    """Return one row per contender and rate, the best attainment of each rate in bold."""
    table = Table(title=f"SLO: TTFT {slo.ttft_s:g} s, ITL p99 {slo.itl_s * 1000:g} ms (p50 / p99 of complete requests)")
    table.add_column("contender")
    for name in ("req/s", "offered", "done", "429", "failed", "TTFT ms", "ITL ms", "TPOT ms", "E2E ms", "max stall ms"):
        table.add_column(name, justify="right")
    table.add_column("attainment", justify="right")
    table.add_column("goodput", justify="right")
    best: dict[float, float] = {}
    for each in summaries:
        rate = round(each.offered_rate, 6)
        best[rate] = max(best.get(rate, 0.0), each.attainment)
    for each in summaries:
        is_best = each.attainment > 0 and each.attainment == best[round(each.offered_rate, 6)]
        table.add_row(
            each.contender,
            f"{each.offered_rate:.2f}",
            str(each.num_offered),
            str(each.num_complete),
            str(each.num_rejected),
            str(each.num_failed),
            *(
                f"{figure.p50_s * 1000:.1f} / {figure.p99_s * 1000:.1f}"
                for figure in (each.ttft, each.itl, each.tpot, each.e2e, each.max_stall)
            ),
            f"{'[bold]' if is_best else ''}{each.attainment:.1%}",
            f"{each.goodput:.2f}",
        )
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
