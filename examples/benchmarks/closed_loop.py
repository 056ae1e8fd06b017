"""Compare OpenAI-compatible servers at fixed concurrency, alternating between them in one run.

    python examples/benchmarks/closed_loop.py --server ours=http://127.0.0.1:8000 --server peer=http://127.0.0.1:8300 \\
        --concurrency 1 --concurrency 8 --concurrency 16

Every client sends its next request when the last one ended: one 448x448 image, 100 words, 64 tokens out, greedy, no
request like another, so that no cache helps. Rounds alternate, because machines drift: compare columns of one table.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from epd.bench.client import Contender, Due, first_model, send
from epd.bench.metrics import Distribution, RequestMetrics, RequestTimeline
from epd.bench.workload import RequestShape, WorkItem, request_body


@dataclass(frozen=True, slots=True)
class Server:
    """A contender, and whether it refuses request fields that OpenAI's API does not have."""

    contender: Contender
    is_strict: bool

    def body(self, item: WorkItem, salt: int) -> bytes:
        body = request_body(item, model=self.contender.model, salt=salt, options=self.contender.options)
        if not self.is_strict:
            return body
        fields = json.loads(body)
        return json.dumps({name: value for name, value in fields.items() if name not in EXTENSIONS}).encode()


EXTENSIONS = ("ignore_eos", "min_tokens")
"""What keeps answers equally long; a server that refuses these needs a model that never ends one by itself."""


async def run_round(server: Server, shape: RequestShape, concurrency: int, num_requests: int, salt: int):
    """Send ``num_requests`` from ``concurrency`` clients; return their logs and the seconds that it took."""
    bodies = []
    for index in range(num_requests):
        seeds = tuple(range(index * 100, index * 100 + shape.num_images))
        bodies.append(Due(index, 0.0, server.body(WorkItem(index, 0.0, shape, seeds), salt)))
    queue, timelines = iter(bodies), []
    limits = httpx.Limits(max_connections=concurrency + 1)
    async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:

        async def one_client() -> None:
            for body in queue:
                timelines.append(await send(client, server.contender, body))

        await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return timelines, max(t.ended_at_s for t in timelines) - min(t.sent_at_s for t in timelines)


def figures(timelines: list[RequestTimeline], duration_s: float) -> dict[str, float]:
    """Sum up one round, in milliseconds and tokens a second."""
    complete = [timeline for timeline in timelines if timeline.is_complete]
    metrics = [RequestMetrics.of(timeline) for timeline in complete]
    ttft = Distribution.of([each.ttft_s for each in metrics])
    itl = Distribution.of([gap for each in metrics for gap in each.gaps_s])
    tpot = Distribution.of([each.tpot_s for each in metrics if each.tpot_s is not None])
    return {
        "failed": len(timelines) - len(complete),
        "ttft_p50": ttft.p50_s * 1000,
        "ttft_p99": ttft.p99_s * 1000,
        "itl_p50": itl.p50_s * 1000,
        "itl_p99": itl.p99_s * 1000,
        "tpot_p50": tpot.p50_s * 1000,
        "tokens_per_s": sum(timeline.num_output_tokens for timeline in complete) / duration_s,
    }


def main(
    server: Annotated[list[str], typer.Option(help="NAME=URL or NAME:MODE=URL; repeat, the first is the baseline.")],
    rest_s: Annotated[float, typer.Option(help="Pause before each round: some servers spin on after one.")] = 3.0,
    strict: Annotated[
        list[str], typer.Option(help="A server's NAME that refuses fields which OpenAI's API lacks; repeat.")
    ] = [],  # noqa: B006
    concurrency: Annotated[list[int], typer.Option(help="Clients at once; repeat.")] = [1, 8, 16],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Rounds of each server at each concurrency.")] = 3,
    requests_per_client: Annotated[int, typer.Option(help="Requests of each client in a round.")] = 3,
    images: int = 1,
    image_size: int = 448,
    input_tokens: int = 100,
    output_tokens: int = 64,
    output: Annotated[Path | None, typer.Option(help="Write all rounds as JSON here.")] = None,
) -> None:
    """Compare servers at fixed concurrency."""
    shape = RequestShape(images, image_size, image_size, input_tokens, output_tokens)
    results = asyncio.run(measure(server, strict, rest_s, concurrency, rounds, requests_per_client, shape))
    table = Table(
        title=f"{images} x {image_size}x{image_size} + {input_tokens} words -> {output_tokens} tokens; medians"
    )
    for name in ("server", "clients", "TTFT p50/p99 ms", "ITL p50/p99 ms", "TPOT ms", "tokens/s (min-max)", "failed"):
        table.add_column(name, justify="left" if name == "server" else "right")
    for (name, clients), rows in results.items():
        median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        speeds = [row["tokens_per_s"] for row in rows]
        table.add_row(
            name,
            str(clients),
            f"{median['ttft_p50']:.0f} / {median['ttft_p99']:.0f}",
            f"{median['itl_p50']:.1f} / {median['itl_p99']:.0f}",
            f"{median['tpot_p50']:.1f}",
            f"{median['tokens_per_s']:.0f} ({min(speeds):.0f}-{max(speeds):.0f})",
            str(sum(int(row["failed"]) for row in rows)),
        )
    Console().print(table)
    if output is not None:
        output.write_text(
            json.dumps([{"server": n, "clients": c, "rounds": r} for (n, c), r in results.items()], indent=1)
        )


async def measure(
    labels: list[str],
    strict: list[str],
    rest_s: float,
    concurrency: list[int],
    rounds: int,
    per_client: int,
    shape: RequestShape,
):
    contenders = [await _contender(label) for label in labels]
    if unknown := set(strict) - {contender.name.partition(":")[0] for contender in contenders}:
        raise typer.BadParameter(f"--strict names no server: {', '.join(sorted(unknown))}")
    servers = [Server(contender, contender.name.partition(":")[0] in strict) for contender in contenders]
    run = int(time.time()) % 1_000_000 * 1000  # no prompt or picture of an earlier run, which a server may still cache
    for server in servers:  # warm-up: first contacts, compilation
        await run_round(server, shape, 2, 4, salt=run)
    results: dict[tuple[str, int], list[dict[str, float]]] = {}
    plan = [(clients, number) for clients in concurrency for number in range(rounds)]
    for clients, number in track(plan, description="rounds"):
        for server in servers:
            await asyncio.sleep(rest_s)
            timelines, duration_s = await run_round(server, shape, clients, clients * per_client, salt=run + number + 1)
            results.setdefault((server.contender.name, clients), []).append(figures(timelines, duration_s))
    return results


async def _contender(server: str) -> Contender:
    label, _, url = server.partition("=")
    _, _, mode = label.partition(":")
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        model = (await first_model(client, url))["id"]
    return Contender(label, url, model, mode or None, wants_trace=False)


if __name__ == "__main__":
    typer.run(main)
