"""Measure what Serve and HTTP cost: CPU time a token and a request by process, engine apart; and time to first token.

    python examples/benchmarks/serving_overhead.py                # starts a server of its own
    python examples/benchmarks/serving_overhead.py --server one=http://127.0.0.1:8001 --server two=http://127.0.0.1:8002

Servers on this machine (Linux: their CPU time is read from ``/proc``, so figures hold when others use the cores too).
Rounds alternate between servers. Each round runs long and short replies: the difference is what a token costs, the rest
is what a request costs. The engine's threads are told from the others of their replica by long prompts, which keep only
them busy. What a cluster burns when idle is measured first and taken off.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from epd.bench.client import Contender, Due, first_model, send
from epd.bench.metrics import RequestMetrics, RequestTimeline
from epd.bench.workload import RequestShape, WorkItem, request_body

LONG, SHORT = 144, 16
"""Output tokens of a reply."""
INPUT_TOKENS = 32
OPTIONS = {"epd": {"trace": True, "slo": {"ttft_s": 600.0, "itl_s": 600.0}}}
"""Objectives that nothing misses, so that every request is admitted."""
PARTS = ("proxy", "ingress", "replica", "engine", "other")
PART_OF_RAY = re.compile(r"^ray::|/raylet/raylet\0|ray\.serve\.scripts|/serve\0run\0")
MEASURED = ("proxy", "ingress", "replica")


# -- CPU time ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Processes:
    """The processes of one server, and the CPU seconds that each of its parts has used."""

    root: int
    engine_threads: set[int] = field(default_factory=set)

    def cpu_s(self) -> Counter[str]:
        used: Counter[str] = Counter()
        for pid in descendants(self.root):
            part = part_of(pid)
            for thread, seconds in thread_cpu_s(pid).items():
                used["engine" if thread in self.engine_threads else part] += seconds
        return used

    def replica_threads(self) -> dict[int, float]:
        pids = [pid for pid in descendants(self.root) if part_of(pid) == "replica"]
        return {thread: seconds for pid in pids for thread, seconds in thread_cpu_s(pid).items()}


def part_of(pid: int) -> str:
    """Say which part of a server a process is, by its title."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return "other"
    if "ray::ProxyActor" in title or "HAProxy" in title or "/haproxy" in title.split("\0")[0]:
        return "proxy"
    if not title.startswith("ray::ServeReplica:"):
        return "other"
    return "ingress" if title.split(":")[4].split(".")[0].strip("\0") == "ingress" else "replica"


def thread_cpu_s(pid: int) -> dict[int, float]:
    """Return the CPU seconds of each thread of a process, exact to the nanosecond."""
    used = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            used[int(path.parent.name)] = int(path.read_text().split()[0]) / 1e9
    return used


def parents() -> dict[int, int]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return found


def descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def server_root(port: int) -> int:
    """Return the topmost process of the cluster that listens on a port: the one that was started by no part of Ray."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":
                inodes.add(f"socket:[{fields[9]}]")
    above = parents()
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(path) in inodes:
                pid = int(path.parts[2])
                while PART_OF_RAY.search(Path(f"/proc/{above[pid]}/cmdline").read_text()):
                    pid = above[pid]
                return pid
    raise SystemExit(f"no process of this machine listens on port {port}")


# -- load --------------------------------------------------------------------------------------------------------------


async def run_clients(contender: Contender, num_clients: int, num_each: int, shape: RequestShape, salt: int):
    """Let clients send one request after the other; return their logs."""
    items = [WorkItem(index, 0.0, shape, ()) for index in range(num_clients * num_each)]
    bodies = iter(
        [Due(item.index, 0.0, request_body(item, model=contender.model, salt=salt, options=OPTIONS)) for item in items]
    )
    timelines: list[RequestTimeline] = []
    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:

        async def one_client() -> None:
            for body in bodies:
                timelines.append(await send(client, contender, body))

        await asyncio.gather(*(one_client() for _ in range(num_clients)))
    failed = [timeline.error for timeline in timelines if timeline.error]
    if failed:
        raise SystemExit(f"{contender.name}: {len(failed)} of {len(timelines)} requests failed, first: {failed[0]}")
    return timelines


@dataclass(frozen=True, slots=True)
class Server:
    contender: Contender
    processes: Processes
    idle: dict[str, float]
    """CPU seconds a second of each part without requests."""


async def introduce(name: str, url: str, salt: int) -> Server:
    """Find the processes of a server, warm it up, tell its engine's thread, and see what it burns when idle."""
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        model = (await first_model(client, url))["id"]
    contender = Contender(name, url, model)
    processes = Processes(server_root(httpx.URL(url).port or 80))
    await run_clients(contender, 16, 1, RequestShape(0, 0, 0, INPUT_TOKENS, SHORT), salt)
    before = processes.replica_threads()
    await run_clients(contender, 1, 6, RequestShape(0, 0, 0, 1000, 2), salt + 1)
    gained = {thread: seconds - before.get(thread, 0.0) for thread, seconds in processes.replica_threads().items()}
    # Threads of one engine share a prompt's work; none of the others comes near them.
    processes.engine_threads = {thread for thread, seconds in gained.items() if seconds > 0.4 * max(gained.values())}
    start, started_s = processes.cpu_s(), time.monotonic()
    await asyncio.sleep(5.0)
    elapsed_s = time.monotonic() - started_s
    end = processes.cpu_s()
    return Server(contender, processes, {part: (end[part] - start[part]) / elapsed_s for part in PARTS})


async def measure_round(server: Server, num_clients: int, num_each: int, salt: int) -> dict[str, float]:
    """Return one round's figures, in milliseconds."""
    costs, timelines, idle = {}, {}, server.idle
    for offset, length in enumerate((LONG, SHORT)):
        shape = RequestShape(0, 0, 0, INPUT_TOKENS, length)
        before, started_s = server.processes.cpu_s(), time.monotonic()
        timelines[length] = await run_clients(server.contender, num_clients, num_each, shape, salt + offset)
        elapsed_s, after = time.monotonic() - started_s, server.processes.cpu_s()
        num_requests = num_clients * num_each
        costs[length] = {
            part: (after[part] - before[part] - idle[part] * elapsed_s) * 1000 / num_requests for part in PARTS
        }
    figures: dict[str, float] = {}
    for part in PARTS:
        per_token = (costs[LONG][part] - costs[SHORT][part]) / (LONG - SHORT)
        figures[part] = per_token
        figures[f"{part} request"] = costs[LONG][part] - per_token * LONG
    figures["token"] = sum(figures[part] for part in MEASURED)
    figures["request"] = sum(figures[f"{part} request"] for part in MEASURED)
    figures["all"] = sum(costs[LONG][part] for part in MEASURED) / LONG
    metrics = [RequestMetrics.of(timeline) for timeline in timelines[LONG]]
    figures["itl"] = statistics.median(gap for each in metrics for gap in each.gaps_s) * 1000
    every = timelines[LONG] + timelines[SHORT]
    figures["ttft"] = statistics.median(RequestMetrics.of(each).ttft_s for each in every) * 1000
    for name in ("ttft", "prefill_queue", "prefill"):
        figures[f"trace {name}"] = statistics.median(each.trace["timings_ms"].get(name, 0.0) for each in every)
    return figures


async def measure(servers: list[str], clients: list[int], rounds: int, num_each: int):
    salt = int(time.time()) % 1_000_000 * 1000
    met = [await introduce(*each.split("=", 1), salt) for each in servers]
    results: dict[tuple[str, int], list[dict[str, float]]] = {}
    plan = [(count, number) for count in clients for number in range(rounds)]
    for count, number in track(plan, description="rounds"):
        for server in met:
            found = await measure_round(server, count, num_each, salt + 10 + 2 * number)
            results.setdefault((server.contender.name, count), []).append(found)
    return met, results


# -- report ------------------------------------------------------------------------------------------------------------


def report(met: list[Server], results: dict[tuple[str, int], list[dict[str, float]]]) -> None:
    console = Console(width=200)
    cost = Table(title="CPU ms a token, idle cluster taken off; medians of rounds (min-max)")
    delay = Table(title="Milliseconds at the client, and what of them the server's own trace explains; medians")
    for name in (
        "server",
        "clients",
        "proxy",
        "ingress",
        "replica, engine apart",
        "together",
        "request",
        "a token, requests spread",
    ):
        cost.add_column(name, justify="left" if name == "server" else "right")
    for name in ("server", "clients", "ITL p50", "engine CPU a token", "TTFT p50", "at the ingress", "queue + prefill"):
        delay.add_column(name, justify="left" if name == "server" else "right")
    for (name, clients), rows in results.items():
        median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        low, high = min(row["token"] for row in rows), max(row["token"] for row in rows)
        spread = f"{median['token']:.3f} ({low:.3f}-{high:.3f})"
        parts = [f"{median[part]:.3f}" for part in MEASURED]
        cost.add_row(name, str(clients), *parts, spread, f"{median['request']:.1f}", f"{median['all']:.3f}")
        prefill = median["trace prefill_queue"] + median["trace prefill"]
        delays = (median["itl"], median["engine"], median["ttft"], median["trace ttft"], prefill)
        delay.add_row(name, str(clients), *(f"{each:.2f}" for each in delays))
    console.print(cost)
    console.print(delay)
    for server in met:
        idle = ", ".join(f"{part} {server.idle[part] * 1000:.1f}" for part in PARTS)
        console.print(f"idle, CPU ms a second, {server.contender.name}: {idle}")


@contextlib.contextmanager
def own_server(config: Path) -> Iterator[str]:
    """Serve a configuration on a free port until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "deployments.cli", "serve", str(config), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if not process.stdout.readline():  # the first steps, printed when it answers
            raise SystemExit("the server did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def main(
    server: Annotated[list[str], typer.Option(help="NAME=URL of a server on this machine; repeat.")] = [],  # noqa: B006
    config: Annotated[Path, typer.Option(help="What to serve if no server is named.")] = Path(
        "configs/aggregated.yaml"
    ),
    clients: Annotated[list[int], typer.Option(help="Streams at once; repeat.")] = [1, 16],  # noqa: B006
    rounds: int = 5,
    requests_per_client: Annotated[int, typer.Option(help="Requests of each client, of either length.")] = 3,
) -> None:
    """Measure the CPU time that Serve and HTTP take for a token."""
    with contextlib.ExitStack() as stack:
        servers = server or [f"here={stack.enter_context(own_server(config))}"]
        report(*asyncio.run(measure(servers, clients, rounds, requests_per_client)))


if __name__ == "__main__":
    typer.run(main)
