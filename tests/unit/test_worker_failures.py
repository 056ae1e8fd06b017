"""Replicas when things go wrong: if these fail, an aborted upload or a dead peer slowly fills a server's memory.

Real workers and connectors in one process; every test ends with all blocks, claims and references back.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import replace

import pytest

from epd.config import EngineConfig, TransferConfig
from epd.errors import EpdError, HandleExpiredError, MediaError, StageFailedError
from epd.transfer.factory import resolve_backend
from epd.types import Mode, Prompt, SamplingParams, Stage
from tests.in_process import InProcessCluster, in_process_cluster, until
from tests.tiny_checkpoints import tiny_qwen2_5_vl
from tests.unit.test_parity import GREEDY, MODES, build, expected_tokens

IMAGES = "three images of different sizes"
BACKENDS = sorted({"by_reference", resolve_backend("auto")})


@contextlib.asynccontextmanager
async def cluster_of(**kwargs):
    async with in_process_cluster(tiny_qwen2_5_vl(), **kwargs) as cluster:
        yield cluster
        await cluster.check_integrity()


class Gate:
    """Holds an engine between two steps until it is opened."""

    def __init__(self, cluster: InProcessCluster, name: str) -> None:
        self._is_open = threading.Event()
        cluster.workers[name].engine_thread.post(lambda engine: self._is_open.wait(60))

    def open(self) -> None:
        self._is_open.set()


async def cancel(task: asyncio.Task) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def start(cluster: InProcessCluster, mode: Mode, case: str = IMAGES, max_tokens: int = 200) -> asyncio.Task:
    prompt = build("tiny", case)
    request = replace(prompt.request, sampling=replace(GREEDY, max_tokens=max_tokens))
    return asyncio.create_task(cluster.run(request, prompt.payloads, mode))


@pytest.mark.parametrize("mode", MODES)
async def test_aborting_during_encode_frees_everything(mode):
    async with cluster_of() as cluster:
        encoder = cluster.workers["e" if mode.splits_encode else ("p" if mode.splits_decode else "all")]
        task = start(cluster, mode)
        await until(lambda: encoder.stats().running_requests[Stage.ENCODE])
        await cancel(task)


@pytest.mark.parametrize("mode", MODES)
async def test_aborting_during_prefill_frees_everything(mode):
    async with cluster_of() as cluster:
        name = "p" if mode.splits_decode else "all"
        gate = Gate(cluster, name)
        task = start(cluster, mode)
        await until(lambda: cluster.workers[name].stats().running_requests[Stage.PREFILL])
        await cancel(task)
        gate.open()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", [Mode.EP_D, Mode.EPD])
async def test_aborting_while_decode_waits_for_blocks_frees_both_sides(mode, backend):
    async with cluster_of(backend=backend) as cluster:
        gate = Gate(cluster, "d")
        task = start(cluster, mode)
        await until(lambda: cluster.workers["p"].load().num_live_handles == 1)
        await until(lambda: cluster.workers["d"].stats().running_requests[Stage.DECODE])
        await cancel(task)
        gate.open()


@pytest.mark.parametrize("mode", MODES)
async def test_aborting_during_decode_frees_everything(mode):
    async with cluster_of() as cluster:
        worker = cluster.workers["d" if mode.splits_decode else "all"]
        task = start(cluster, mode, max_tokens=1000)
        await until(lambda: worker.stats().decode_tokens > 3)
        await cancel(task)


@pytest.mark.parametrize("mode", MODES)
async def test_an_undecodable_image_fails_its_request_alone_and_names_the_part(mode):
    async with cluster_of() as cluster:
        prompt = build("tiny", IMAGES)
        good = start(cluster, mode, "one image", max_tokens=12)
        with pytest.raises(MediaError) as raised:
            await cluster.run(prompt.request, {**prompt.payloads, 1: b"\x89PNG not really"}, mode)
        assert raised.value.param == "messages[0].content[1]"
        tokens, _ = await good
        assert tuple(tokens[0]) == expected_tokens("tiny", "one image")


@pytest.mark.parametrize("case", ["no image", IMAGES])
@pytest.mark.parametrize("mode", [Mode.EP_D, Mode.EPD])
async def test_lost_kv_is_computed_again_with_the_same_tokens(mode, case):
    """The owner gives the blocks up before they are fetched, once; the stream shows nothing of it."""
    async with cluster_of() as cluster:
        decode = cluster.workers["d"].data.kv
        fetch, failures = decode.fetch, iter([HandleExpiredError("the lease ran out")])

        async def fail_once(handle, into, first_block=0):
            for error in failures:
                raise error
            return await fetch(handle, into, first_block)

        decode.fetch = fail_once
        prompt = build("tiny", case)
        tokens, _ = await cluster.run(prompt.request, prompt.payloads, mode)
        assert tuple(tokens[0]) == expected_tokens("tiny", case)
        assert cluster.workers["d"].stats().transfer_failures["kv"] == 1


async def test_lost_kv_is_an_error_when_the_policy_says_fail():
    async with cluster_of(transfer=TransferConfig(on_failure="fail")) as cluster:
        prompt = build("tiny", "no image")

        async def expired(handle, into, first_block=0):
            raise HandleExpiredError("the lease ran out")

        cluster.workers["d"].data.kv.fetch = expired
        with pytest.raises(StageFailedError):
            await cluster.run(prompt.request, prompt.payloads, Mode.EP_D)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_prefill_replica_that_dies_before_its_kv_is_fetched_costs_a_text_prompt_only_time(backend):
    async with cluster_of(backend=backend) as cluster:
        gate = Gate(cluster, "d")
        prompt = build("tiny", "no image")
        task = asyncio.create_task(cluster.run(prompt.request, prompt.payloads, Mode.EP_D))
        await until(lambda: cluster.workers["p"].load().num_live_handles == 1)
        dead = cluster.workers.pop("p")
        cluster.peers.remove("p")
        await dead.close()
        gate.open()
        tokens, _ = await task
        assert tuple(tokens[0]) == expected_tokens("tiny", "no image")


async def test_claims_of_a_dead_holder_end_with_their_lease():
    async with cluster_of(transfer=TransferConfig(lease_s=0.4)) as cluster:
        prompt, worker = build("tiny", "no image"), cluster.workers["p"]
        prefilled = await worker.prefill(prompt.request, Prompt(), {})
        assert prefilled.kv is not None
        assert worker.load().num_live_handles == 1
        await until(lambda: worker.load().num_live_handles == 0)


async def test_a_waiting_decode_keeps_the_lease_alive_longer_than_it_lasts():
    async with cluster_of(transfer=TransferConfig(lease_s=0.4)) as cluster:
        gate = Gate(cluster, "d")
        prompt = build("tiny", "no image")
        task = asyncio.create_task(cluster.run(prompt.request, prompt.payloads, Mode.EP_D))
        await until(lambda: cluster.workers["d"].stats().running_requests[Stage.DECODE])
        await asyncio.sleep(1.2)  # three leases: the subject of this test is real time
        assert cluster.workers["p"].load().num_live_handles == 1
        gate.open()
        tokens, _ = await task
        assert tuple(tokens[0]) == expected_tokens("tiny", "no image")
        assert cluster.workers["d"].stats().transfer_failures["kv"] == 0


async def test_a_step_that_raises_fails_its_requests_and_the_replica_goes_on():
    async with cluster_of() as cluster:
        engine = cluster.workers["all"].engine_thread

        def poison(running):
            run = running._runner.run

            def fail(*args):
                running._runner.run = run
                raise RuntimeError("a kernel failed")

            running._runner.run = fail

        await engine.call(poison)
        with pytest.raises(EpdError, match="a step failed"):
            await cluster.workers["all"].decode(*_prompt_of("no image")).__anext__()
        tokens, _ = await start(cluster, Mode.AGGREGATED, "no image", max_tokens=12)
        assert tuple(tokens[0]) == expected_tokens("tiny", "no image")


async def test_an_engine_that_stops_fails_what_waits_for_it_and_what_comes_later():
    async with in_process_cluster(tiny_qwen2_5_vl()) as cluster:  # no books to check once it has stopped
        worker = cluster.workers["all"]

        def poison(running):
            def fail():
                raise RuntimeError("the books do not balance")

            running.serve_reservations = fail

        request, *rest = _prompt_of("no image")
        streams = [worker.decode(replace(request, request_id=f"waits-{index}"), *rest) for index in range(3)]
        firsts = [asyncio.ensure_future(stream.__anext__()) for stream in streams]
        await worker.engine_thread.call(poison)
        for outcome in await asyncio.gather(*firsts, return_exceptions=True):
            # One may have had its first token before the engine stopped.
            assert isinstance(outcome, tuple) or "the engine stopped (RuntimeError)" in str(outcome)
        await until(lambda: not worker.is_healthy)
        with pytest.raises(EpdError, match="the engine stopped"):
            await worker.decode(*_prompt_of("no image")).__anext__()
        with pytest.raises(EpdError, match="the engine stopped"):
            await worker.engine_thread.call(lambda running: None)
        for stream in streams:
            await stream.aclose()


def _prompt_of(case: str):
    prompt = build("tiny", case)
    return prompt.request, Prompt((None,) * len(prompt.request.items)), prompt.payloads


async def test_a_replica_refuses_a_stage_outside_its_roles():
    async with cluster_of() as cluster:
        with pytest.raises(StageFailedError, match="does not have the role"):
            await cluster.workers["d"].encode(*_prompt_of(IMAGES)[::2])
        with pytest.raises(StageFailedError, match="does not have the role"):
            await cluster.workers["e"].prefill(*_prompt_of("no image"))


async def test_a_repeated_image_is_encoded_once():
    async with cluster_of() as cluster:
        prompt = build("tiny", "one image")
        for mode in (Mode.EPD, Mode.EPD, Mode.E_PD):
            tokens, _ = await cluster.run(prompt.request, prompt.payloads, mode)
            assert tuple(tokens[0]) == expected_tokens("tiny", "one image")
        assert cluster.workers["e"].stats().encode_items == 1


@pytest.mark.parametrize("mode", MODES)
async def test_sampling_with_a_seed_gives_the_same_tokens_in_every_mode(mode):
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=123, n=3, max_tokens=10, ignore_eos=True)
    prompt = build("tiny", "one image")
    request = replace(prompt.request, sampling=sampling)
    async with cluster_of() as cluster:
        reference, _ = await cluster.run(request, prompt.payloads, Mode.AGGREGATED)
        tokens, _ = await cluster.run(request, prompt.payloads, mode)
        assert tokens == reference
        assert len({tuple(choice) for choice in tokens.values()}) == 3


async def test_a_prompt_that_never_fits_is_refused_before_prefill():
    small = EngineConfig(kv_cache_bytes=20_000, num_threads=1)
    async with cluster_of(engine=small) as cluster:
        with pytest.raises(EpdError, match="KV blocks"):
            await start(cluster, Mode.AGGREGATED, "no image", max_tokens=4000)
