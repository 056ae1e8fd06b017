"""What a replica does around its worker. If these fail, tokens are lost or delayed on their way out, or a replica full
of streams no longer answers the calls that would free it.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

import deployments.pool
from deployments.messages import LaneAddress, Payloads
from deployments.pool import StagePool
from epd.errors import AdmissionRejectedError, StageFailedError
from epd.testing import FakeStageWorker
from epd.types import (
    MediaItem,
    Modality,
    PlaceholderRange,
    Prompt,
    Request,
    SamplingParams,
    Stage,
    TokenChunk,
)
from tests.local.in_process_service import FakePeers


@pytest.fixture
def make_pool(monkeypatch: pytest.MonkeyPatch):
    """Build replicas outside of Serve, which tells each one its id."""
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="abc"), app_name="app")
    monkeypatch.setattr(deployments.pool.serve, "get_replica_context", lambda: context)

    def make(max_ongoing_requests: int = 8, **worker_options: Any) -> tuple[StagePool, FakeStageWorker]:
        peers = FakePeers()
        pool = StagePool(
            "pool",
            lambda replica_id, _: FakeStageWorker(replica_id, "pool", Stage, peers, **worker_options),
            max_ongoing_requests,
        )
        worker = pool._worker
        assert isinstance(worker, FakeStageWorker)
        peers.workers[worker.replica_id] = worker
        return pool, worker

    return make


def request(max_tokens: int = 4, num_items: int = 0) -> Request:
    items = tuple(
        MediaItem(index, Modality.IMAGE, f"hash{index}", PlaceholderRange(index, 1), (1, 2, 2))
        for index in range(num_items)
    )
    return Request("r", (1, 2, 3), SamplingParams(max_tokens=max_tokens), items)


def tokens_of(chunks: tuple[TokenChunk, ...]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def test_a_stream_brings_all_tokens_in_order_and_loads_first_and_last(make_pool):
    pool, worker = make_pool()
    items = [item async for item in pool.decode(request(7), Prompt(), Payloads())]
    assert [token for item in items for token in tokens_of(item.chunks)] == [1, 2, 3, 1, 2, 3, 1]
    assert items[0].load is not None
    assert items[-1].load is not None
    assert items[-1].load.num_running == 0
    assert worker.load().num_running == 0


async def test_a_stream_leaves_through_its_callers_channel_while_that_is_open_but_for_its_first_and_last_item(
    make_pool,
):
    gate = asyncio.Event()
    pool, _ = make_pool(pause=gate.wait)
    lane = LaneAddress("channel", 7)
    stream = pool.decode(request(5), Prompt(), Payloads(), lane)
    first = await anext(stream)
    messages = pool.outputs("channel")
    reading = asyncio.create_task(anext(messages))
    await asyncio.sleep(0)
    gate.set()
    last = [item async for item in stream]
    message = await reading
    assert (first.index, tokens_of(first.chunks)) == (0, [1])
    assert [(number, index) for number, index, _ in message.items] == [(7, 1), (7, 2), (7, 3), (7, 4)]
    assert message.load is not None
    assert [(item.index, item.chunks) for item in last] == [(5, ())]
    await messages.aclose()
    await pool.check_integrity()


@pytest.mark.parametrize("num_read", [0, 1, 3])
async def test_leaving_a_stream_at_any_point_closes_it(make_pool, num_read: int):
    pool, worker = make_pool(pause=lambda: asyncio.sleep(0))
    stream = pool.decode(request(1000), Prompt(), Payloads())
    for _ in range(num_read):
        await anext(stream)
    await stream.aclose()
    assert worker.load().num_running == 0
    await pool.check_integrity()


async def test_a_full_replica_refuses_stages_and_still_answers_releases(make_pool):
    pool, worker = make_pool(max_ongoing_requests=1, pause=asyncio.Event().wait)
    stream = pool.decode(request(1000), Prompt(), Payloads())
    await anext(stream)
    with pytest.raises(AdmissionRejectedError, match="limit of 1"):
        await pool.prefill(request(), Prompt(), Payloads())
    assert (await pool.release(["unknown"])).load.num_running == 1
    await stream.aclose()
    assert (await pool.prefill(request(), Prompt(), Payloads())).value.kv is not None
    assert worker.load().num_live_handles == 1


async def test_media_sent_ahead_are_claimed_by_their_call(make_pool):
    pool, _ = make_pool()
    await pool.deposit("ticket", (1, 0), b"second", b"first")
    encoded = await pool.encode(request(num_items=2), Payloads(ticket="ticket"))
    assert [handle.mm_hash for handle in encoded.value.handles] == ["hash1", "hash0"]
    with pytest.raises(StageFailedError):
        await pool.encode(request(num_items=2), Payloads(ticket="ticket"))
    await pool.deposit("unused", (0,), b"x")
    with pytest.raises(AssertionError, match="no request"):
        await pool.check_integrity()
    await pool.discard("unused")
    await pool.release([handle.handle_id for handle in encoded.value.handles])
    await pool.check_integrity()


async def test_a_replica_that_stops_waits_for_the_claims_of_others(make_pool):
    pool, _ = make_pool()
    prefilled = (await pool.prefill(request(), Prompt(), Payloads())).value
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0)
    assert not closing.done()
    await pool.release([prefilled.kv.handle_id])
    await closing


async def test_health_follows_the_worker(make_pool):
    pool, worker = make_pool()
    await pool.check_health()
    worker.is_healthy = False
    with pytest.raises(RuntimeError, match="pool#abc"):
        await pool.check_health()
