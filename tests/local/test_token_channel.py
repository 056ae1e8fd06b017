"""Token streams that share their messages. If these fail, a reply loses or repeats tokens, hangs when its replica goes,
or a replica that is scaled down waits for an ingress that has nothing to ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncGenerator

import pytest

from deployments.messages import ChannelMessage, LaneAddress
from deployments.token_channel import ChannelLostError, Lane, Outlets, TokenChannel
from epd.errors import StageFailedError
from epd.types import FinishReason, ReplicaLoad, StageReport, TokenChunk, TokenLogprob

ADDRESS = LaneAddress("channel", 1)


def chunk(*token_ids: int) -> tuple[TokenChunk, ...]:
    return (TokenChunk(0, token_ids),)


async def taken(lane: Lane) -> list[int]:
    return [token for chunks in [c async for c in lane.items()] for each in chunks for token in each.token_ids]


# -- the replica's end -------------------------------------------------------------------------------------------------


async def test_what_streams_have_ready_together_leaves_in_one_message():
    outlets = Outlets()
    messages = outlets.messages("channel")
    with outlets.lane(LaneAddress("channel", 1)) as first, outlets.lane(LaneAddress("channel", 2)) as second:
        reading = asyncio.create_task(anext(messages))
        await asyncio.sleep(0)
        assert first(1, chunk(5))
        assert second(1, chunk(6))
        assert first(2, chunk(7))
        assert [(number, index) for number, index, _ in await reading] == [(1, 1), (2, 1), (1, 2)]
    await messages.aclose()


async def test_an_item_without_an_open_channel_is_left_to_its_own_call():
    outlets = Outlets()
    with outlets.lane(None) as put:
        assert not put(1, chunk(5))
    with outlets.lane(ADDRESS) as put:
        assert not put(1, chunk(5))
        messages = outlets.messages("channel")
        reading = asyncio.create_task(anext(messages))
        await asyncio.sleep(0)
        assert put(2, chunk(6))
        await reading
        await messages.aclose()
        assert not put(3, chunk(7))


async def test_a_channel_ends_by_itself_once_no_stream_uses_it():
    outlets = Outlets(linger_s=0.0)
    with outlets.lane(ADDRESS) as put:
        messages = outlets.messages("channel")
        reading = asyncio.create_task(anext(messages))
        await asyncio.sleep(0)
        put(1, chunk(5))
        assert await reading
        ending = asyncio.create_task(anext(messages, None))
        await asyncio.sleep(0)
        assert not ending.done()
    assert await ending is None
    with outlets.lane(ADDRESS) as put:
        assert not put(1, chunk(5))


async def test_a_channel_that_is_opened_anew_outlives_the_end_of_the_old_one():
    outlets = Outlets()
    with outlets.lane(ADDRESS) as put:
        old, new = outlets.messages("channel"), outlets.messages("channel")
        reading = [asyncio.create_task(anext(messages)) for messages in (old, new)]
        await asyncio.sleep(0)
        reading[0].cancel()
        await asyncio.gather(reading[0], return_exceptions=True)
        assert put(1, chunk(5))
        assert len(await reading[1]) == 1
        await new.aclose()


# -- the ingress's end -------------------------------------------------------------------------------------------------


async def test_items_are_joined_in_order_whichever_way_they_came():
    lane = Lane(ADDRESS)
    lane.put(2, chunk(3))
    lane.put(0, chunk(1))
    items = lane.items()
    assert await anext(items) == chunk(1)
    lane.put(4, ())
    lane.end()
    lane.put(1, chunk(2))
    lane.put(3, chunk(4))
    assert [each.token_ids for each in await anext(items)] == [(2,), (3,), (4,)]
    assert await anext(items, None) is None


async def test_a_stream_waits_for_what_is_still_in_the_channel_when_its_call_has_ended():
    lane = Lane(ADDRESS)
    lane.put(0, chunk(1))
    lane.put(2, ())
    lane.end()
    reading = asyncio.create_task(taken(lane))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not reading.done()
    lane.put(1, chunk(2))
    assert await reading == [1, 2]


async def test_an_error_comes_after_the_tokens_before_it():
    lane = Lane(ADDRESS)
    lane.put(0, chunk(1))
    lane.end(StageFailedError("decode", "died"))
    items = lane.items()
    assert await anext(items) == chunk(1)
    with pytest.raises(StageFailedError):
        await anext(items)


async def test_a_stream_outlives_a_channel_that_broke_unless_tokens_are_missing():
    whole, gap = Lane(ADDRESS), Lane(ADDRESS)
    for lane in (whole, gap):
        lane.put(0, chunk(1))
        lane.lose_channel()
    whole.put(1, chunk(2))
    whole.put(2, ())
    whole.end()
    assert await taken(whole) == [1, 2]
    gap.put(2, chunk(3))
    with pytest.raises(ChannelLostError):
        await taken(gap)


class Replica:
    """Streams ten tokens a request through real outlets; messages are pickled, as on the wire."""

    def __init__(self) -> None:
        self.outlets = Outlets(linger_s=0.0)
        self.num_opened = 0
        self.num_direct = 0
        self.num_messages = 0
        self.breaks_after: int | None = None

    async def messages(self, channel_id: str) -> AsyncGenerator[ChannelMessage]:
        self.num_opened += 1
        async with contextlib.aclosing(self.outlets.messages(channel_id)) as messages:
            async for items in messages:
                if self.num_messages == self.breaks_after:
                    raise ConnectionError("reset")
                self.num_messages += 1
                yield pickle.loads(pickle.dumps(ChannelMessage(items, load())))

    async def decode(self, lane: Lane) -> None:
        with self.outlets.lane(lane.address) as put:
            for index in range(10):
                if not index or not put(index, chunk(index)):
                    self.num_direct += 1
                    lane.put(index, chunk(index))
                await asyncio.sleep(0)
        lane.put(10, ())
        lane.end()


def load() -> ReplicaLoad:
    return ReplicaLoad(
        replica_id="pool#a",
        pool="pool",
        roles=frozenset(),
        num_waiting=0,
        num_running=0,
        num_queued_prefill_tokens=0,
        num_queued_encode_items=0,
        num_queued_encode_patches=0,
        num_context_tokens=0,
        num_blocks=1,
        num_free_blocks=1,
        block_size=16,
        num_live_handles=0,
        reported_at_s=0.0,
    )


async def answers(replica: Replica, channel: TokenChannel, num_streams: int) -> list[object]:
    async def one() -> list[int]:
        with channel.lane() as lane:
            decoding = asyncio.create_task(replica.decode(lane))
            try:
                return await taken(lane)
            finally:
                await decoding

    return await asyncio.gather(*(one() for _ in range(num_streams)), return_exceptions=True)


async def test_one_stream_opens_no_channel_and_several_share_one():
    replica, loads = Replica(), []
    channel = TokenChannel(replica.messages, asyncio.create_task, loads.append)
    assert await answers(replica, channel, 1) == [list(range(10))]
    assert (replica.num_opened, replica.num_direct) == (0, 10)
    assert await answers(replica, channel, 8) == [list(range(10))] * 8
    assert replica.num_opened == 1
    assert 0 < replica.num_messages < 20
    assert loads


async def test_a_channel_that_has_ended_is_opened_again_when_it_is_needed():
    replica = Replica()
    channel = TokenChannel(replica.messages, asyncio.create_task, lambda _: None)
    for _ in range(2):
        assert await answers(replica, channel, 4) == [list(range(10))] * 4
        assert channel._reading is not None
        await channel._reading
    assert replica.num_opened == 2


async def test_a_channel_that_breaks_costs_only_the_streams_whose_tokens_were_in_it():
    replica = Replica()
    replica.breaks_after = 3
    channel = TokenChannel(replica.messages, asyncio.create_task, lambda _: None)
    for answer in await answers(replica, channel, 4):
        assert answer == list(range(10)) or isinstance(answer, ChannelLostError)
    replica.breaks_after = None
    assert await answers(replica, channel, 4) == [list(range(10))] * 4


async def test_every_kind_of_chunk_comes_through_unchanged():
    chunks = (
        TokenChunk(0, (1, 2)),
        TokenChunk(1, (3,), FinishReason.STOP),
        TokenChunk(2, (4,), None, (TokenLogprob(4, -0.5, ((4, -0.5),)),)),
        TokenChunk(3, (5,), None, (), StageReport({"decode": 1.0})),
    )
    outlets, got = Outlets(linger_s=0.0), []
    channel = TokenChannel(lambda channel_id: _wired(outlets, channel_id), asyncio.create_task, lambda _: None)
    with channel.lane() as lane, channel.lane(), outlets.lane(lane.address) as put:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert put(0, chunks)
        got = await anext(lane.items())
    assert got == chunks


async def _wired(outlets: Outlets, channel_id: str) -> AsyncGenerator[ChannelMessage]:
    async with contextlib.aclosing(outlets.messages(channel_id)) as messages:
        async for items in messages:
            yield ChannelMessage(items)
