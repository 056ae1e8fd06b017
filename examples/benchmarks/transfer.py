"""Measure KV blocks moving between two processes over NIXL, pulled and pushed, against plain copies of as many bytes.

    python examples/benchmarks/transfer.py

The first table sets each transfer beside two bounds, all taken in turns: one ``copy_`` of as many bytes within one
process, and the bare system call that UCX uses between processes (``process_vm_readv``) over the same ranges. Blocks
lie either side by side, so that one descriptor holds them all, or scattered on both sides, one descriptor each. The
second table is what a request pays apart from its bytes, and what first contact costs with and without having met. CPU
seconds are those of the process that reads or writes; the other one does nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from epd.cache.kv_cache import KVCache, allocate_kv_cache
from epd.transfer.moves import Moves, block_runs, plan_moves
from epd.transfer.nixl import NixlKVConnector
from epd.transfer.nixl_endpoint import NixlEndpoint
from epd.types import KVHandle, KVSpec, KVTarget

_MAX_IOVECS = 1024
"""How many ranges the kernel takes in one call."""
_NUM_SMALL_BLOCKS = 4


@dataclass(frozen=True)
class Setup:
    """What both processes build: a cache of twice as many blocks as the largest transfer moves."""

    num_blocks: int
    block_kib: int
    has_huge_pages: bool

    def connect(self, name: str) -> tuple[NixlEndpoint, KVCache, NixlKVConnector]:
        spec = KVSpec(1, 1, self.block_kib * 1024 // (2 * 16 * 2), "bfloat16", 2)
        cache = allocate_kv_cache(spec, block_size=16, num_blocks=2 * self.num_blocks, model_fingerprint="bench")
        if not self.has_huge_pages:
            cache = replace(cache, blocks=torch.zeros_like(cache.blocks))
        endpoint = NixlEndpoint(name)
        return endpoint, cache, NixlKVConnector(endpoint, cache, 3600.0, time.monotonic)

    def blocks(self, mebibytes: int, *, scattered: bool, seed: int) -> list[int]:
        count = mebibytes * 1024 // self.block_kib
        return random.Random(seed).sample(range(2 * self.num_blocks), count) if scattered else list(range(count))


@dataclass
class Peer:
    """The other process, as this one sees it: it lends and accepts what it is asked to."""

    pipe: Connection
    pid: int
    address: int
    introduction: bytes

    def ask(self, *question: Any) -> Any:
        self.pipe.send(question)
        return self.pipe.recv()


def serve(pipe: Connection, setup: Setup) -> None:
    """The other process: answer until told to stop."""
    endpoint, cache, connector = setup.connect("peer")
    pipe.send((os.getpid(), cache.blocks.data_ptr(), connector.introduction()))
    while (question := pipe.recv())[0] != "stop":
        what, *details = question
        if what == "lend":
            pipe.send(connector.publish(details[0], 16 * len(details[0]), 0, lambda: None))
        elif what == "accept":
            pipe.send(connector.accept(details[0], 0))
        elif what == "land":
            pipe.send("waiting")
            asyncio.run(connector.landed(details[0]))
            pipe.send(time.monotonic())
            connector.close_target(details[0])
        elif what == "cpu":
            pipe.send(time.process_time())
    connector.close()
    endpoint.close()


class SystemCall:
    """``process_vm_readv`` over the same ranges as a transfer, with nothing around it."""

    def __init__(self, pid: int, moves: Moves) -> None:
        self._pid = pid
        self._call = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._call.restype = ctypes.c_ssize_t
        self._call.argtypes = [ctypes.c_int, *([ctypes.c_void_p, ctypes.c_ulong] * 2), ctypes.c_ulong]
        self._parts = []
        for first in range(0, len(moves), _MAX_IOVECS):
            part = moves[first : first + _MAX_IOVECS]
            local, remote = part[:, [1, 2]].copy(), part[:, [0, 2]].copy()  # Rows are the kernel's struct iovec.
            self._parts.append((local, remote, int(part[:, 2].sum())))

    def __call__(self) -> None:
        for local, remote, num_bytes in self._parts:
            if self._call(self._pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0) != num_bytes:
                raise OSError(ctypes.get_errno(), "process_vm_readv")


@dataclass
class Timings:
    """Seconds of each way to move the same bytes, by name, and CPU seconds of all turns."""

    wall_s: dict[str, list[float]]
    cpu_s: dict[str, float]


async def take_turns(ways: dict[str, Callable[[], Awaitable[object] | None]], repeats: int) -> Timings:
    """Time each way once a round; the first two rounds are for warming up."""
    timings = Timings({name: [] for name in ways}, dict.fromkeys(ways, 0.0))
    for turn in range(repeats + 2):
        for name, move in ways.items():
            cpu_s, started_s = time.process_time(), time.perf_counter()
            moving = move()
            if moving is not None:
                await moving
            ended_s = time.perf_counter()
            if turn >= 2:
                timings.wall_s[name].append(ended_s - started_s)
                timings.cpu_s[name] += time.process_time() - cpu_s
    return timings


async def measure_bytes(setup: Setup, peer: Peer, cache: KVCache, connector: NixlKVConnector, repeats: int) -> Table:
    columns = ["copy ms", "system call ms", "pull ms", "push ms", "copy GB/s", "pull GB/s", "push GB/s"]
    columns += ["pull's share of copy's speed", "push's share", "pull's CPU s/GB", "push's CPU s/GB"]
    table = Table("size", "blocks", *columns)
    for mebibytes in (1, 8, 64):
        num_bytes = mebibytes * 2**20
        flat = cache.blocks.view(torch.uint8).view(-1)
        source, target = flat[:num_bytes], flat[flat.nbytes // 2 : flat.nbytes // 2 + num_bytes]
        for scattered in (False, True):
            here = setup.blocks(mebibytes, scattered=scattered, seed=1)
            there = setup.blocks(mebibytes, scattered=scattered, seed=2)
            handle: KVHandle = peer.ask("lend", there)
            opened: KVTarget = peer.ask("accept", there)
            moves = plan_moves(
                block_runs(there, peer.address, cache.block_bytes),
                block_runs(here, cache.blocks.data_ptr(), cache.block_bytes),
            )
            ways: dict[str, Callable[[], Awaitable[object] | None]] = {
                "copy": lambda source=source, target=target: copy(source, target),
                "call": SystemCall(peer.pid, moves),
                "pull": lambda handle=handle, here=here: connector.fetch(handle, here),
                "push": lambda opened=opened, here=here: connector.push(opened, here, 0, is_last=False),
            }
            timings = await take_turns(ways, repeats * (64 // mebibytes if mebibytes > 1 else 16))
            medians = {name: statistics.median(values) for name, values in timings.wall_s.items()}
            ratios = [
                statistics.median(a / b for a, b in zip(timings.wall_s["copy"], timings.wall_s[way], strict=True))
                for way in ("pull", "push")
            ]
            per_gb = num_bytes / 1e9 * len(timings.wall_s["pull"])
            table.add_row(
                f"{mebibytes} MiB",
                f"{len(here)} scattered" if scattered else f"{len(here)} adjacent",
                *(f"{medians[name] * 1000:.2f}" for name in ("copy", "call", "pull", "push")),
                *(f"{num_bytes / medians[name] / 1e9:.1f}" for name in ("copy", "pull", "push")),
                *(f"{ratio:.0%}" for ratio in ratios),
                *(f"{timings.cpu_s[name] / per_gb:.2f}" for name in ("pull", "push")),
            )
    return table


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


async def measure_messages(peer: Peer, connector: NixlKVConnector, repeats: int) -> Table:
    few = list(range(0, 2 * _NUM_SMALL_BLOCKS, 2))
    handle: KVHandle = peer.ask("lend", few)
    opened: KVTarget = peer.ask("accept", few)
    ways: dict[str, Callable[[], Awaitable[object] | None]] = {
        "meeting again: read a word, write one, give notice": lambda: connector.meet(peer.introduction),
        f"pull of {len(few)} blocks": lambda: connector.fetch(handle, few),
        f"push of {len(few)} blocks": lambda: connector.push(opened, few, 0, is_last=False),
    }
    times = (await take_turns(ways, repeats * 20)).wall_s
    landings = []
    for _ in range(repeats * 5):
        target: KVTarget = peer.ask("accept", few)
        peer.ask("land", target.target_id)
        started_s = time.monotonic()
        await connector.push(target, few, 0, is_last=True)
        landings.append(peer.pipe.recv() - started_s)
    cpu_s, peer_cpu_s, started_s = time.process_time(), peer.ask("cpu"), time.monotonic()
    await asyncio.sleep(2)
    idle = (time.process_time() - cpu_s + peer.ask("cpu") - peer_cpu_s) / (time.monotonic() - started_s) / 2
    caption = f"An idle endpoint takes {idle:.2%} of a core."
    return tabulate(
        "What a request pays apart from its bytes",
        {**times, f"push of {len(few)} blocks, until the other process knows": landings},
        caption,
    )


async def measure_contact(setup: Setup, repeats: int) -> Table:
    """Time the first transfer to a process that was not met before, and to one that was."""
    times: dict[str, list[float]] = {}

    async def timed(name: str, moving: Awaitable[object]) -> None:
        started_s = time.perf_counter()
        await moving
        times.setdefault(name, []).append(time.perf_counter() - started_s)

    few = list(range(0, 2 * _NUM_SMALL_BLOCKS, 2))
    for _ in range(repeats):
        for what in ("pull", "push"):
            for has_met in (False, True):
                process, peer = start(setup)
                endpoint, _, connector = setup.connect("here")
                handle, target = peer.ask("lend", few), peer.ask("accept", few)
                if has_met:
                    await timed("meeting", connector.meet(peer.introduction))
                first = connector.fetch(handle, few) if what == "pull" else connector.push(target, few, 0, is_last=True)
                met = "having met" if has_met else "not having met"
                await timed(f"first {what} of {len(few)} blocks, {met}", first)
                stop(process, peer, endpoint, connector)
    return tabulate("First contact", times)


def tabulate(title: str, times: dict[str, list[float]], caption: str = "") -> Table:
    table = Table(title, "min ms", "median ms", "max ms", caption=caption)
    for name, values in times.items():
        table.add_row(name, *(f"{value * 1000:.2f}" for value in (min(values), statistics.median(values), max(values))))
    return table


def start(setup: Setup) -> tuple[Any, Peer]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, setup))
    process.start()
    return process, Peer(ours, *ours.recv())


def stop(process: Any, peer: Peer, endpoint: NixlEndpoint, connector: NixlKVConnector) -> None:
    connector.close()
    endpoint.close()
    peer.pipe.send(("stop",))
    process.join(30)


async def measure(setup: Setup, repeats: int, contacts: int) -> list[Table]:
    process, peer = start(setup)
    endpoint, cache, connector = setup.connect("here")
    tables = [
        await measure_bytes(setup, peer, cache, connector, repeats),
        await measure_messages(peer, connector, repeats),
    ]
    stop(process, peer, endpoint, connector)
    return [*tables, await measure_contact(setup, contacts)]


def main(
    block_kib: Annotated[
        int, typer.Option(help="Size of a block: of a small model 64, of a large one 512 or more.")
    ] = 64,
    repeats: Annotated[int, typer.Option(help="Rounds of the largest transfer; smaller ones take more.")] = 15,
    contacts: Annotated[int, typer.Option(help="New processes to make contact with, each way.")] = 3,
    huge_pages: Annotated[bool, typer.Option(help="Keep blocks in huge pages, as replicas do.")] = True,
) -> None:
    """Measure transfers between two processes."""
    setup = Setup(64 * 1024 // block_kib, block_kib, huge_pages)
    console = Console(width=160)
    for table in asyncio.run(measure(setup, repeats, contacts)):
        console.print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
