"""The life of a request over replicas: a failure here is a stream that stops, repeats itself, or leaks memory.

Replicas are fakes that echo the prompt and keep books of what they lend; failures are injected by wrapping one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from epd.errors import (
    DeadlineExceededError,
    EpdError,
    MediaError,
    PeerLostError,
    RequestReturnedError,
    StageFailedError,
)
from epd.stages.life import LifeOptions, generate
from epd.testing import UNDECODABLE, FakeStageWorker, echo_tokens
from epd.types import (
    MediaItem,
    Modality,
    Mode,
    PlaceholderRange,
    Placement,
    Prompt,
    Request,
    SamplingParams,
    Stage,
    TokenChunk,
)

MODES = {
    Mode.AGGREGATED: ("x", "x", "x"),
    Mode.E_PD: ("e", "x", "x"),
    Mode.EP_D: ("p", "p", "d"),
    Mode.EPD: ("e", "p", "d"),
}


class Peers:
    """Calls between fakes, by name."""

    def __init__(self) -> None:
        self.workers: dict[str, FakeStageWorker] = {}

    async def read(self, owner: str, handle_id: str, first: int, count: int):
        return self.workers[owner].read(handle_id, first, count)

    async def renew(self, owner: str, handle_ids) -> None:
        await self.workers[owner].renew(handle_ids)

    async def release(self, owner: str, handle_ids) -> None:
        await self.workers[owner].release(handle_ids)


class Failing:
    """A replica that raises in one stage, the first ``times`` times: before anything, or after some chunks."""

    def __init__(self, worker: FakeStageWorker, stage: Stage, error: Exception, *, after: int = 0, times: int = 99):
        self._worker, self._stage, self._error, self._after, self._times = worker, stage, error, after, times

    def _is_due(self, stage: Stage) -> bool:
        if stage is not self._stage or self._times == 0:
            return False
        self._times -= 1
        return True

    async def encode(self, request, payloads):
        if self._is_due(Stage.ENCODE):
            raise self._error
        return await self._worker.encode(request, payloads)

    async def prefill(self, request, prompt, payloads):
        if self._is_due(Stage.PREFILL):
            raise self._error
        return await self._worker.prefill(request, prompt, payloads)

    async def decode(self, request, source, payloads):
        is_due, count = self._is_due(Stage.DECODE), 0
        async with contextlib.aclosing(self._worker.decode(request, source, payloads)) as stream:
            async for chunks in stream:
                if is_due and count == self._after:
                    raise self._error
                count += 1
                yield chunks

    async def provide(self, leg_id, index, handle) -> bool:
        return await self._worker.provide(leg_id, index, handle)

    async def resume(self, leg_id, prefilled) -> bool:
        return await self._worker.resume(leg_id, prefilled)

    async def release(self, handle_ids) -> None:
        await self._worker.release(handle_ids)


class Replicas:
    def __init__(self) -> None:
        self.peers = Peers()
        for pool in ("e", "p", "d", "x"):
            for number in (1, 2):
                name = f"{pool}{number}"
                self.peers.workers[name] = FakeStageWorker(name, pool, list(Stage), self.peers)
        self.clients: dict[str, object] = dict(self.peers.workers)

    def break_replica(self, name: str, stage: Stage, error: Exception, **kwargs: int) -> None:
        self.clients[name] = Failing(self.peers.workers[name], stage, error, **kwargs)

    def place(self, mode: Mode, request: Request, excluded: frozenset[str]) -> Placement:
        def pick(pool: str) -> str:
            alive = [name for name in (f"{pool}1", f"{pool}2") if name not in excluded]
            if not alive:
                raise StageFailedError(pool, "no replica is left")
            return alive[0]

        encode, prefill, decode = MODES[mode]
        return Placement(mode, pick(prefill), pick(decode), tuple(pick(encode) for _ in request.items))

    async def run(self, request: Request, payloads: Mapping[int, bytes], mode: Mode, **kwargs: Any):
        updates = []
        stream = generate(
            request,
            payloads,
            lambda part, excluded: self.place(mode, part, excluded),
            self.clients.get,
            LifeOptions(**kwargs),
        )
        async with contextlib.aclosing(stream):
            async for update in stream:
                updates.append(update)
        return updates

    async def check_integrity(self) -> None:
        for worker in self.peers.workers.values():
            await worker.check_integrity()
            assert worker.load().num_live_handles == 0, f"{worker.replica_id} still lends memory"


@pytest.fixture
async def replicas():
    replicas = Replicas()
    yield replicas
    await replicas.check_integrity()


def image_request(num_items: int = 2, max_tokens: int = 9, n: int = 1) -> Request:
    items = tuple(
        MediaItem(index, Modality.IMAGE, f"h{index}", PlaceholderRange(2 + 3 * index, 2), (1, 2, 4), param=f"[{index}]")
        for index in range(num_items)
    )
    return Request("r", tuple(range(12)), SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n), items)


PAYLOADS = {0: b"zero", 1: b"one"}


def tokens_of(updates) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for update in updates:
        for chunk in update.chunks:
            tokens.setdefault(chunk.choice, []).extend(chunk.token_ids)
    return tokens


@pytest.mark.parametrize("mode", MODES)
async def test_every_mode_streams_each_token_once(replicas, mode):
    request = image_request()
    updates = await replicas.run(request, PAYLOADS, mode)
    assert tokens_of(updates) == {0: list(echo_tokens(request))}
    assert updates[-1].placement.mode is mode


@pytest.mark.parametrize("mode", MODES)
async def test_a_request_that_ends_with_its_first_token_has_no_decode_leg(replicas, mode):
    updates = await replicas.run(image_request(max_tokens=1), PAYLOADS, mode)
    assert tokens_of(updates) == {0: [0]}
    if mode.splits_decode:
        assert replicas.peers.workers["d1"].stats().stage_requests.get(Stage.DECODE, 0) == 0


@pytest.mark.parametrize(
    ("mode", "replica", "stage"),
    [
        (Mode.EPD, "e1", Stage.ENCODE),
        (Mode.EPD, "p1", Stage.PREFILL),
        (Mode.EPD, "d1", Stage.DECODE),
        (Mode.EP_D, "p1", Stage.PREFILL),
        (Mode.E_PD, "x1", Stage.DECODE),
        (Mode.AGGREGATED, "x1", Stage.DECODE),
    ],
)
async def test_another_replica_takes_over_from_one_that_is_lost(replicas, mode, replica, stage):
    request = image_request()
    replicas.break_replica(replica, stage, StageFailedError(stage, "the replica died"))
    updates = await replicas.run(request, PAYLOADS, mode)
    assert tokens_of(updates) == {0: list(echo_tokens(request))}
    placement = updates[-1].placement
    assert replica not in (placement.prefill, placement.decode, *placement.encode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("after", [1, 3])
async def test_a_stream_goes_on_where_a_lost_decode_replica_stopped(replicas, mode, after):
    request = image_request()
    decode = MODES[mode][2] + "1"
    replicas.break_replica(decode, Stage.DECODE, StageFailedError("decode", "the replica died"), after=after)
    updates = await replicas.run(request, PAYLOADS, mode)
    assert tokens_of(updates) == {0: list(echo_tokens(request))}
    assert updates[-1].num_attempts == 2


async def test_all_choices_of_a_lost_stream_are_finished(replicas):
    request = image_request(n=3)
    replicas.break_replica("x1", Stage.DECODE, PeerLostError("gone"), after=2)
    updates = await replicas.run(request, PAYLOADS, Mode.AGGREGATED)
    assert tokens_of(updates) == {choice: list(echo_tokens(request)) for choice in range(3)}


async def test_a_request_given_back_is_resumed_and_is_no_failed_attempt(replicas):
    request = image_request()
    for name in ("d1", "d2"):
        replicas.break_replica(name, Stage.DECODE, RequestReturnedError("r", "no blocks"), after=1, times=4)
    updates = await replicas.run(request, PAYLOADS, Mode.EPD, max_attempts=1)
    assert tokens_of(updates) == {0: list(echo_tokens(request))}
    assert updates[-1].num_attempts == 5


class Gated(Failing):
    """An encoder that holds one item back until it is told."""

    def __init__(self, worker: FakeStageWorker, item: int) -> None:
        super().__init__(worker, Stage.DECODE, EpdError("unused"))
        self._item = item
        self.gate = asyncio.Event()

    async def encode(self, request, payloads):
        if self._item in payloads:
            await self.gate.wait()
        return await self._worker.encode(request, payloads)


class Noting(Failing):
    """A replica that notes when its prefill is called, and for what."""

    def __init__(self, worker: FakeStageWorker) -> None:
        super().__init__(worker, Stage.ENCODE, EpdError("unused"))
        self.prompts: list[Prompt] = []
        self.provided: list[int] = []

    async def prefill(self, request, prompt, payloads):
        self.prompts.append(prompt)
        return await self._worker.prefill(request, prompt, payloads)

    async def provide(self, leg_id, index, handle) -> bool:
        is_taken = await self._worker.provide(leg_id, index, handle)
        self.provided.append(index)
        return is_taken


async def eventually(condition) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0)


async def test_prefill_starts_while_images_are_still_being_encoded(replicas):
    encoder = replicas.clients["e1"] = Gated(replicas.peers.workers["e1"], item=0)
    prefill = replicas.clients["p1"] = Noting(replicas.peers.workers["p1"])
    running = asyncio.create_task(replicas.run(image_request(), PAYLOADS, Mode.EPD))
    await eventually(lambda: prefill.provided == [1])
    assert [prompt.awaited for prompt in prefill.prompts] == [frozenset({0, 1})]
    encoder.gate.set()
    assert tokens_of(await running) == {0: list(echo_tokens(image_request()))}


async def test_without_overlap_prefill_starts_with_every_embedding(replicas):
    prefill = replicas.clients["p1"] = Noting(replicas.peers.workers["p1"])
    updates = await replicas.run(image_request(), PAYLOADS, Mode.EPD, overlap=False)
    assert tokens_of(updates) == {0: list(echo_tokens(image_request()))}
    (prompt,) = prefill.prompts
    assert not prompt.awaited
    assert [handle.mm_hash for handle in prompt.embeddings] == ["h0", "h1"]
    assert prefill.provided == []


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", [Mode.EPD, Mode.E_PD])
async def test_only_the_items_of_a_lost_encoder_are_encoded_again(replicas, mode, overlap):
    request = image_request()
    replicas.break_replica("e1", Stage.ENCODE, StageFailedError("encode", "the replica died"), times=1)
    consumer = replicas.peers.workers["p1" if mode is Mode.EPD else "x1"]
    updates = await replicas.run(request, PAYLOADS, mode, overlap=overlap)
    assert tokens_of(updates) == {0: list(echo_tokens(request))}
    assert [replicas.peers.workers[name].stats().encode_items for name in ("e1", "e2")] == [1, 1]
    assert consumer.stats().stage_requests[Stage.PREFILL] == 1
    assert sorted(updates[-1].placement.encode) == ["e1", "e2"], "the trace names who encoded"
    assert updates[-1].num_attempts == 1


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_prompt_whose_image_nobody_can_encode_ends_and_leaves_nothing(replicas, overlap):
    for name in ("e1", "e2"):
        replicas.break_replica(name, Stage.ENCODE, StageFailedError("encode", f"{name} died"))
    with pytest.raises(StageFailedError, match="died"):
        await replicas.run(image_request(), PAYLOADS, Mode.EPD, overlap=overlap)
    for name in ("p1", "p2"):
        assert replicas.peers.workers[name].load().num_running == 0


async def test_attempts_to_encode_count_against_the_requests_limit(replicas):
    calls = []

    class Dying(Failing):
        async def encode(self, request, payloads):
            calls.append(self._worker.replica_id)
            raise StageFailedError("encode", "died")

    for name in ("e1", "e2"):
        replicas.clients[name] = Dying(replicas.peers.workers[name], Stage.ENCODE, EpdError("unused"))
    with pytest.raises(StageFailedError):
        await replicas.run(image_request(num_items=1), {0: b"zero"}, Mode.EPD, max_attempts=2)
    assert calls == ["e1", "e2"]


async def test_a_bad_image_ends_the_prefill_that_waits_for_it(replicas):
    prefill = replicas.clients["p1"] = Noting(replicas.peers.workers["p1"])
    with pytest.raises(MediaError):
        await replicas.run(image_request(), {0: b"zero", 1: UNDECODABLE}, Mode.EPD)
    assert len(prefill.prompts) <= 1
    assert replicas.peers.workers["p1"].load().num_running == 0


async def test_a_reader_that_leaves_while_an_image_is_encoded_leaves_nothing_behind(replicas):
    replicas.clients["e1"] = Gated(replicas.peers.workers["e1"], item=0)
    prefill = replicas.clients["p1"] = Noting(replicas.peers.workers["p1"])
    running = asyncio.create_task(replicas.run(image_request(), PAYLOADS, Mode.EPD))
    await eventually(lambda: prefill.provided == [1])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert replicas.peers.workers["p1"].load().num_running == 0


async def test_the_clients_own_fault_is_not_retried(replicas):
    with pytest.raises(MediaError):
        await replicas.run(image_request(), {0: b"zero", 1: UNDECODABLE}, Mode.EPD)
    assert replicas.peers.workers["e2"].stats().stage_requests.get(Stage.ENCODE, 0) == 0


async def test_the_last_failure_is_told_when_every_attempt_failed(replicas):
    for name in ("p1", "p2"):
        replicas.break_replica(name, Stage.PREFILL, StageFailedError("prefill", f"{name} died"))
    with pytest.raises(StageFailedError, match="p2 died"):
        await replicas.run(image_request(), PAYLOADS, Mode.EPD, max_attempts=2)


async def test_a_request_past_its_deadline_ends_at_once(replicas):
    request = replace(image_request(), deadline_s=time.time() - 1)
    with pytest.raises(DeadlineExceededError):
        await replicas.run(request, PAYLOADS, Mode.EPD)


class Stuck:
    """A replica that never says a word after its first token; notes how its stream was left."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()
        self.was_left = False

    async def decode(self, request, source, payloads):
        try:
            yield (TokenChunk(0, (1,)),)
            self.waits.set()
            await asyncio.Event().wait()
        finally:
            self.was_left = True


def stuck_stream(stuck: Stuck, deadline_s: float):
    request = Request("r", (1, 2), SamplingParams(max_tokens=9), deadline_s=deadline_s)
    return generate(request, {}, lambda *_: Placement(Mode.AGGREGATED, "r", "r"), lambda _: stuck)


async def test_a_deadline_that_passes_between_two_tokens_ends_the_request():
    stuck = Stuck()
    stream = stuck_stream(stuck, time.time() + 0.05)
    await anext(stream)
    with pytest.raises(DeadlineExceededError):
        await anext(stream)
    assert stuck.was_left
    assert not asyncio.current_task().cancelling()


async def test_a_deadline_that_passes_while_the_reader_is_busy_interrupts_the_reader_not():
    stuck = Stuck()
    stream = stuck_stream(stuck, time.time() + 0.01)
    await anext(stream)
    rung = asyncio.Event()
    asyncio.get_running_loop().call_later(0.02, rung.set)
    await rung.wait()
    with pytest.raises(DeadlineExceededError):
        await anext(stream)
    assert not stuck.waits.is_set()
    assert stuck.was_left


async def test_a_request_that_is_cancelled_before_its_deadline_is_cancelled():
    stuck = Stuck()
    stream = stuck_stream(stuck, time.time() + 600)
    await anext(stream)
    reading = asyncio.create_task(anext(stream))
    await stuck.waits.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert stuck.was_left


@pytest.mark.parametrize("mode", MODES)
async def test_a_reader_that_leaves_after_the_first_token_leaves_nothing_behind(replicas, mode):
    stream = generate(
        image_request(),
        PAYLOADS,
        lambda part, excluded: replicas.place(mode, part, excluded),
        replicas.clients.get,
    )
    await anext(stream)
    await stream.aclose()


async def test_a_cancelled_request_releases_what_encode_published(replicas):
    entered = asyncio.Event()

    class Hanging(Failing):
        async def prefill(self, request, prompt, payloads):
            entered.set()
            await asyncio.Event().wait()

    replicas.clients["p1"] = Hanging(replicas.peers.workers["p1"], Stage.PREFILL, EpdError("unused"))
    task = asyncio.create_task(replicas.run(image_request(), PAYLOADS, Mode.EPD))
    await entered.wait()
    assert replicas.peers.workers["e1"].load().num_live_handles == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
