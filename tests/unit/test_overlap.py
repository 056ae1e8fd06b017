"""Prefill beside encode, over real replicas in one process. If these fail, a prompt with several images waits for the
last of them before anything is computed, answers something else than without overlap, or leaves memory lent."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping
from typing import Any

import pytest

from epd.config import EngineConfig
from epd.stages.worker import StageWorker
from epd.transfer.factory import resolve_backend
from epd.types import Encoded, Mode, Request, StageReport
from tests.in_process import in_process_cluster, random_image, until
from tests.reference import CASES, build, build_parts, checkpoint, expected_tokens, generated

BACKENDS = sorted({"by_reference", resolve_backend("auto")})
SPLIT_ENCODE = [Mode.E_PD, Mode.EPD]
MODES = [Mode.AGGREGATED, Mode.E_PD, Mode.EP_D, Mode.EPD]
TEXT = "The quick brown fox jumps over the lazy dog, and the green bird sings in the tree. "


class Held:
    """An encoder that keeps every item back until its gate opens."""

    def __init__(self, worker: StageWorker) -> None:
        self._worker = worker
        self.gate = asyncio.Event()
        self.num_waiting = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    async def encode(self, request: Request, payloads: Mapping[int, bytes]) -> Encoded:
        self.num_waiting += 1
        try:
            await self.gate.wait()
        finally:
            self.num_waiting -= 1
        return await self._worker.encode(request, payloads)


def consumer_of(mode: Mode) -> str:
    return "p" if mode.splits_decode else "all"


@pytest.mark.parametrize("mode", SPLIT_ENCODE)
async def test_text_and_the_first_image_are_prefilled_while_the_second_is_being_encoded(mode):
    prompt = build_parts("tiny", [TEXT, random_image(1, 112, 84), TEXT, random_image(2, 56, 84), "What is this?"])
    second = prompt.request.items[1].placeholder.offset
    async with in_process_cluster(checkpoint("tiny")) as cluster:
        held = cluster.workers["e2"] = Held(cluster.workers["e2"])  # type: ignore[assignment]
        consumer = cluster.workers[consumer_of(mode)]
        running = asyncio.create_task(cluster.run(prompt.request, prompt.payloads, mode))
        await until(lambda: consumer.stats().prefill_tokens == second, "text and first image were not prefilled")
        assert held.num_waiting == 1
        held.gate.set()
        tokens, _ = await running
        assert tuple(tokens[0]) == generated("tiny", prompt)
        await cluster.check_integrity()


@pytest.mark.parametrize("mode", SPLIT_ENCODE)
async def test_without_overlap_nothing_is_prefilled_before_the_last_image_is_encoded(mode):
    prompt = build_parts("tiny", [TEXT, random_image(1, 112, 84), TEXT, random_image(2, 56, 84), "What is this?"])
    async with in_process_cluster(checkpoint("tiny")) as cluster:
        held = cluster.workers["e2"] = Held(cluster.workers["e2"])  # type: ignore[assignment]
        consumer = cluster.workers[consumer_of(mode)]
        running = asyncio.create_task(cluster.run(prompt.request, prompt.payloads, mode, overlap=False))
        await until(lambda: held.num_waiting == 1 and cluster.workers["e"].load().num_live_handles == 1)
        assert consumer.stats().prefill_tokens == 0
        held.gate.set()
        tokens, _ = await running
        assert tuple(tokens[0]) == generated("tiny", prompt)
        await cluster.check_integrity()


@pytest.mark.parametrize("mode", SPLIT_ENCODE)
async def test_an_embedding_that_the_prefill_replica_holds_is_not_waited_for(mode):
    image = random_image(1, 112, 84)
    first, second = build_parts("tiny", [image, "What is this?"]), build_parts("tiny", [TEXT, image, "Count them."])
    async with in_process_cluster(checkpoint("tiny")) as cluster:
        await cluster.run(first.request, first.payloads, mode)
        cluster.workers["e"] = Held(cluster.workers["e"])  # type: ignore[assignment]
        tokens, chunks = await cluster.run(second.request, second.payloads, mode)
        assert tuple(tokens[0]) == generated("tiny", second)
        report = sum((chunk.report for chunk in chunks if chunk.report is not None), StageReport())
        assert report.cached["embedding_items"] == 1
        assert "embedding" not in report.transferred_bytes
        await cluster.check_integrity()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_tokens_are_right_at_64_requests_with_chunks_and_aborts(backend):
    rng = random.Random(7)
    engine = EngineConfig(kv_cache_bytes=16 * 2**20, num_threads=1, max_num_batched_tokens=23, max_num_seqs=16)
    async with in_process_cluster(checkpoint("tiny"), backend=backend, engine=engine) as cluster:

        async def one(number: int) -> None:
            case, mode = rng.choice(list(CASES)), rng.choice(MODES)
            prompt, overlap, leaves_after_s = build("tiny", case), rng.random() < 0.7, rng.uniform(0.0, 2.0)
            running = asyncio.create_task(cluster.run(prompt.request, prompt.payloads, mode, overlap=overlap))
            if number % 3 == 0:
                await asyncio.wait([running], timeout=leaves_after_s)
                running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                tokens, _ = await running
                assert tuple(tokens[0]) == expected_tokens("tiny", case), f"{case}, {mode}, overlap {overlap}"

        await asyncio.gather(*(one(number) for number in range(64)))
        await cluster.check_integrity()
