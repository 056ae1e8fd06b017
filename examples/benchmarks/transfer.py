"""Measure KV blocks moving between two processes over NIXL, against a plain copy of as many bytes.

    python examples/benchmarks/transfer.py --mebibytes 64 --block-kib 64

Blocks lie scattered on both sides, so each is a descriptor of its own. The copy runs in the reading process,
alternating with the transfers; CPU seconds are those of the reader.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import time
from multiprocessing.connection import Connection

import torch
import typer
from rich.console import Console
from rich.table import Table

from epd.cache.kv_cache import KVCache, allocate_kv_cache
from epd.transfer.nixl import NixlKVConnector
from epd.transfer.nixl_endpoint import NixlEndpoint
from epd.types import KVHandle, KVSpec


def make_cache(num_blocks: int, block_kib: int) -> KVCache:
    """A cache of twice as many blocks as are moved: one layer and head, and a head size that makes the block size."""
    spec = KVSpec(1, 1, block_kib * 1024 // (2 * 16 * 2), "bfloat16", 2)
    return allocate_kv_cache(spec, block_size=16, num_blocks=2 * num_blocks, model_fingerprint="bench")


def own(pipe: Connection, num_blocks: int, block_kib: int) -> None:
    """The lending process: publish scattered blocks, and wait to be told to stop."""
    endpoint = NixlEndpoint("owner")
    connector = NixlKVConnector(endpoint, make_cache(num_blocks, block_kib), 300.0, time.monotonic)
    for count in (num_blocks, 4):
        blocks = random.Random(count).sample(range(2 * num_blocks), count)
        pipe.send(connector.publish(blocks, 16 * count, 0, lambda: None))
    pipe.recv()
    connector.close()
    endpoint.close()


async def fetch_times(connector: NixlKVConnector, handle: KVHandle, into: list[int], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        await connector.fetch(handle, into)
        times.append(time.perf_counter() - started_s)
    return times


def main(mebibytes: int = 64, block_kib: int = 64, repeats: int = 15) -> None:
    """Measure transfers between two processes."""
    num_blocks = mebibytes * 1024 // block_kib
    context = multiprocessing.get_context("spawn")
    pipe, far = context.Pipe()
    process = context.Process(target=own, args=(far, num_blocks, block_kib))
    process.start()
    large, small = pipe.recv(), pipe.recv()
    endpoint = NixlEndpoint("reader")
    cache = make_cache(num_blocks, block_kib)
    connector = NixlKVConnector(endpoint, cache, 300.0, time.monotonic)
    into = random.Random(9).sample(range(2 * num_blocks), num_blocks)
    source, target = (torch.ones(mebibytes * 2**20, dtype=torch.uint8) for _ in range(2))

    async def measure() -> dict[str, list[float]]:
        times = {"first contact and fetch of 4 blocks": await fetch_times(connector, small, into[:4], 1)}
        await fetch_times(connector, large, into, 2)
        cpu_s, copies, transfers = time.process_time(), [], []
        for _ in range(repeats):
            started_s = time.perf_counter()
            target.copy_(source)
            copies.append(time.perf_counter() - started_s)
            transfers += await fetch_times(connector, large, into, 1)
        copied_s = statistics.median(copies) * repeats
        times[f"copy of {mebibytes} MiB in one process"] = copies
        times[f"NIXL, {mebibytes} MiB in {num_blocks} blocks"] = transfers
        times["reader's CPU seconds of such a transfer"] = [(time.process_time() - cpu_s - copied_s) / repeats]
        times["NIXL, 4 blocks"] = await fetch_times(connector, small, into[:4], 100)
        return times

    times = asyncio.run(measure())
    table = Table("what", "min ms", "median ms", "max ms", "median GB/s")
    for name, values in times.items():
        median_s = statistics.median(values)
        speed = f"{mebibytes * 2**20 / median_s / 1e9:.1f}" if f"{mebibytes} MiB" in name else ""
        cells = (min(values), median_s, max(values))
        table.add_row(name, *(f"{value * 1000:.2f}" for value in cells), speed)
    Console().print(table)
    connector.close()
    endpoint.close()
    pipe.send("stop")
    process.join(30)


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
