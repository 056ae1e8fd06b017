"""KV blocks pushed to the decode replica while a prompt is being prefilled. If these fail, a split request answers
something else than an aggregated one, decodes from blocks that are still being written, or leaves blocks out of use.

Real workers over NIXL in one process; every test ends with all blocks, targets, claims and references back.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from epd.config import EngineConfig, TransferConfig
from epd.errors import ConfigError, PeerGoneError, PeerLostError, TransferError
from epd.transfer.factory import resolve_backend
from epd.types import KVTarget, Mode, Stage, StageReport, TokenChunk
from tests.in_process import InProcessCluster, in_process_cluster, until
from tests.reference import CASES, GREEDY, build, checkpoint, expected_tokens

pytestmark = pytest.mark.skipif(resolve_backend("auto") != "nixl", reason="NIXL is not installed or does not work here")

SPLIT_DECODE = [Mode.EP_D, Mode.EPD]
IMAGES = "three images of different sizes"
SMALL_CHUNKS = EngineConfig(
    kv_cache_bytes=8 * 2**20, num_threads=1, block_size=4, max_num_batched_tokens=9, max_num_seqs=4
)


@contextlib.asynccontextmanager
async def cluster_of(**kwargs: Any) -> AsyncIterator[InProcessCluster]:
    kwargs.setdefault("engine", SMALL_CHUNKS)
    async with in_process_cluster(checkpoint("tiny"), backend="nixl", **kwargs) as cluster:
        yield cluster
        await cluster.check_integrity()
        for worker in cluster.workers.values():
            if worker.data.kv is not None:
                await until(lambda kv=worker.data.kv: kv.num_targets == 0, "a target is still open")


class Spied:
    """A connector that notes what is pushed through it, and may hold it back or fail."""

    def __init__(self, cluster: InProcessCluster, name: str = "p") -> None:
        pushes = cluster.workers[name]._pushes
        assert pushes is not None
        self._connector = pushes._connector
        pushes._connector = self  # type: ignore[assignment]
        self.calls: list[tuple[int, int, bool]] = []
        self.targets: list[KVTarget] = []
        self.gate: asyncio.Event | None = None
        self.error: TransferError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    async def push(self, target: KVTarget, block_ids: Sequence[int], first_block: int, *, is_last: bool) -> int:
        self.calls.append((first_block, len(block_ids), is_last))
        self.targets.append(target)
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await self._connector.push(target, block_ids, first_block, is_last=is_last)


@contextlib.asynccontextmanager
async def writing(cluster: InProcessCluster) -> AsyncIterator[tuple[Spied, asyncio.Task[Any]]]:
    """Hold a request where its first blocks are about to be written."""
    prompt, spy = build("tiny", IMAGES), Spied(cluster)
    spy.gate = asyncio.Event()
    running = asyncio.create_task(cluster.run(prompt.request, prompt.payloads, Mode.EPD))
    await until(lambda: spy.calls, "nothing was pushed")
    yield spy, running


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def total(chunks: Sequence[TokenChunk]) -> StageReport:
    return sum((chunk.report for chunk in chunks if chunk.report is not None), StageReport())


@pytest.mark.parametrize("mode", SPLIT_DECODE)
async def test_blocks_are_written_while_later_chunks_are_computed(mode):
    prompt = build("tiny", IMAGES)
    async with cluster_of() as cluster:
        spy = Spied(cluster)
        tokens, chunks = await cluster.run(prompt.request, prompt.payloads, mode)
        assert tuple(tokens[0]) == expected_tokens("tiny", IMAGES)
        num_blocks = -(-prompt.request.num_prompt_tokens // 4)
        assert len(spy.calls) > 1, "all was written at the end"
        assert [is_last for _, _, is_last in spy.calls] == [False] * (len(spy.calls) - 1) + [True]
        ends = [0, *(first + count for first, count, _ in spy.calls)]
        assert [first for first, _, _ in spy.calls] == ends[:-1], "every block once, in order"
        assert ends[-1] == num_blocks
        assert total(chunks).transferred_bytes["kv"] == num_blocks * cluster.workers["d"]._block_bytes


@pytest.mark.parametrize("push", [True, False])
@pytest.mark.parametrize("mode", SPLIT_DECODE)
async def test_tokens_equal_generate_pushed_and_pulled(mode, push):
    async with cluster_of() as cluster:
        spy = Spied(cluster)
        for case in CASES:
            prompt = build("tiny", case)
            tokens, _ = await cluster.run(prompt.request, prompt.payloads, mode, push=push)
            assert tuple(tokens[0]) == expected_tokens("tiny", case), case
        assert bool(spy.calls) == push


async def test_choices_share_what_was_pushed_for_them():
    prompt = build("tiny", IMAGES)
    request = replace(prompt.request, sampling=replace(GREEDY, n=3))
    async with cluster_of() as cluster:
        tokens, _ = await cluster.run(request, prompt.payloads, Mode.EPD)
        assert [tuple(tokens[choice]) for choice in range(3)] == [expected_tokens("tiny", IMAGES)] * 3


async def test_only_what_the_decode_replica_lacks_is_pushed():
    """The last block, which is partly filled: no prefix cache holds that."""
    case = next(case for case in CASES if build("tiny", case).request.num_prompt_tokens % 4)
    prompt = build("tiny", case)
    async with cluster_of() as cluster:
        await cluster.run(prompt.request, prompt.payloads, Mode.EPD)
        spy = Spied(cluster)
        tokens, chunks = await cluster.run(prompt.request, prompt.payloads, Mode.EPD)
        assert tuple(tokens[0]) == expected_tokens("tiny", case)
        assert spy.calls == [(prompt.request.num_prompt_tokens // 4, 1, True)]
        assert total(chunks).transferred_bytes["kv"] == cluster.workers["d"]._block_bytes


async def test_a_request_that_ends_at_its_first_token_has_opened_a_target_and_leaves_nothing():
    prompt = build("tiny", IMAGES, max_tokens=1)
    async with cluster_of() as cluster:
        spy = Spied(cluster)
        tokens, _ = await cluster.run(prompt.request, prompt.payloads, Mode.EPD)
        assert tokens == {0: [expected_tokens("tiny", IMAGES)[0]]}
        assert spy.targets


async def test_blocks_are_fetched_when_the_decode_replica_has_no_room_in_time():
    """The decode replica is full until the prompt is done: it says too late where it wants the blocks."""
    prompt = build("tiny", IMAGES)
    async with cluster_of() as cluster:
        spy = Spied(cluster)
        engine = cluster.workers["d"].engine_thread
        assert engine is not None
        taken: list[int] = []
        await engine.call(lambda running: taken.extend(running.pool.allocate(running.pool.num_free)))
        running = asyncio.create_task(cluster.run(prompt.request, prompt.payloads, Mode.EPD))
        await until(lambda: cluster.workers["p"].load().num_live_handles == 1, "prefill did not lend its blocks out")
        await engine.call(lambda running: running.pool.release(taken))
        tokens, _ = await running
        assert tuple(tokens[0]) == expected_tokens("tiny", IMAGES)
        assert spy.calls == []


async def test_blocks_are_fetched_when_pushing_fails():
    prompt = build("tiny", IMAGES)
    async with cluster_of() as cluster:
        Spied(cluster).error = PeerLostError("the connection broke")
        tokens, _ = await cluster.run(prompt.request, prompt.payloads, Mode.EPD)
        assert tuple(tokens[0]) == expected_tokens("tiny", IMAGES)
        assert cluster.workers["p"].stats().transfer_failures["kv"] == 1


@pytest.mark.parametrize("is_gone", [False, True])
async def test_blocks_stay_out_of_use_until_the_writer_has_stopped_or_is_dead(is_gone):
    async with cluster_of() as cluster:
        decode, stop, num_asked = cluster.workers["d"], cluster.peers.stop_push, 0

        async def unreachable(replica_id: str, target_id: str) -> None:
            nonlocal num_asked
            num_asked += 1
            if num_asked < 4:
                raise PeerLostError("it does not answer")
            if is_gone:
                raise PeerGoneError("it is gone")
            await stop(replica_id, target_id)

        cluster.peers.stop_push = unreachable  # type: ignore[method-assign]
        async with writing(cluster) as (_, running):
            await cancel(running)
        await until(lambda: num_asked >= 2)
        assert decode.load().num_free_blocks < decode.load().num_blocks, "blocks were free while they could be written"
        await until(lambda: decode.load().num_free_blocks == decode.load().num_blocks, "blocks never came back")
        assert num_asked == 4


async def test_a_writer_that_is_stopped_has_stopped_when_that_is_answered():
    async with cluster_of() as cluster, writing(cluster) as (spy, running):
        pushes = cluster.workers["p"]._pushes
        assert pushes is not None
        assert pushes.num_writing == 1
        await cluster.workers["p"].stop_push(spy.targets[0].target_id)
        assert pushes.num_writing == 0
        tokens, _ = await running  # what was not pushed is fetched
        assert tuple(tokens[0]) == expected_tokens("tiny", IMAGES)


async def test_a_target_that_was_stopped_before_it_was_heard_of_is_refused():
    async with cluster_of() as cluster:
        writer = cluster.workers["p"]
        target = KVTarget("target", "d", "nixl", "layout", 0, 1, b"")
        await writer.stop_push("target")
        assert not writer.push_to("leg", target)
        assert writer.push_to("leg", replace(target, target_id="another"))


async def test_a_request_that_is_cancelled_while_its_target_is_open_frees_both_sides():
    async with cluster_of() as cluster, writing(cluster) as (_, running):
        await cancel(running)


async def test_a_decode_replica_that_is_lost_early_costs_another_attempt():
    """The decode leg runs beside prefill: its failure is noticed then, and the request starts anew."""
    prompt = build("tiny", IMAGES)
    async with cluster_of() as cluster:
        worker, num_calls = cluster.workers["d"], 0
        decode = worker.decode

        def failing(request, source, payloads):
            nonlocal num_calls
            num_calls += 1
            if num_calls == 1:
                return lost()
            return decode(request, source, payloads)

        async def lost():
            raise PeerLostError("the replica died")
            yield ()

        worker.decode = failing  # type: ignore[method-assign]
        tokens, _ = await cluster.run(prompt.request, prompt.payloads, Mode.EPD)
        assert tuple(tokens[0]) == expected_tokens("tiny", IMAGES)
        assert num_calls == 2
        assert worker.stats().running_requests[Stage.DECODE] == 0


async def test_pushing_by_name_needs_a_backend_that_can():
    with pytest.raises(ConfigError, match="kv_mode"):
        async with in_process_cluster(
            checkpoint("tiny"), backend="by_reference", transfer=TransferConfig(kv_mode="push"), names=("p",)
        ):
            pass


async def test_tokens_are_right_at_64_requests_with_chunks_and_aborts():
    rng = random.Random(11)
    busy = {"max_num_batched_tokens": 19, "max_num_seqs": 16, "kv_cache_bytes": 16 * 2**20}
    engine = SMALL_CHUNKS.model_copy(update=busy)
    async with cluster_of(engine=engine) as cluster:

        async def one(number: int) -> None:
            case, mode, push = rng.choice(list(CASES)), rng.choice(SPLIT_DECODE), rng.random() < 0.8
            prompt, leaves_after_s = build("tiny", case), rng.uniform(0.0, 2.0)
            running = asyncio.create_task(
                cluster.run(prompt.request, prompt.payloads, mode, overlap=rng.random() < 0.7, push=push)
            )
            if number % 3 == 0:
                await asyncio.wait([running], timeout=leaves_after_s)
                running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                tokens, _ = await running
                assert tuple(tokens[0]) == expected_tokens("tiny", case), f"{case}, {mode}, push {push}"

        await asyncio.gather(*(one(number) for number in range(64)))
