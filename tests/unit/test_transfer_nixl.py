"""What is particular to NIXL: one-sided transfers of memory that its owner may reuse, and peers that die or freeze.

If these fail, a reader takes another request's bytes for its own, a late write corrupts a request that reused the
blocks, or one dead replica takes others with it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from epd.cache.kv_cache import KVCache, allocate_kv_cache
from epd.errors import ConfigError, HandleExpiredError, IncompatiblePeerError, PeerLostError, TransferError
from epd.transfer.factory import resolve_backend
from epd.transfer.moves import Moves
from epd.transfer.nixl import NixlEmbeddingConnector, NixlKVConnector
from epd.transfer.nixl_agent import Region
from epd.transfer.nixl_endpoint import _NUM_LEASE_WORDS, NixlEndpoint, PeerMemory
from epd.transfer.slab import EmbeddingSlab
from epd.transfer.steps import Steps
from epd.types import EmbeddingHandle, KVHandle, KVSpec


def _has_nixl() -> bool:
    try:
        return resolve_backend("nixl") == "nixl"
    except ConfigError:
        return False


pytestmark = pytest.mark.skipif(not _has_nixl(), reason="nixl is not installed or does not work here")

NUM_BLOCKS = 64


def make_cache(seed: int) -> KVCache:
    cache = allocate_kv_cache(
        KVSpec(2, 1, 8, "bfloat16", 2), block_size=16, num_blocks=NUM_BLOCKS, model_fingerprint="m"
    )
    cache.blocks.copy_(torch.randn(cache.blocks.shape, generator=torch.Generator().manual_seed(seed)))
    return cache


class Replica:
    """An endpoint with both connectors."""

    def __init__(self, name: str, *, seed: int, contact_timeout_s: float = 20.0) -> None:
        self.endpoint = NixlEndpoint(name, contact_timeout_s=contact_timeout_s)
        self.cache = make_cache(seed)
        self.kv = NixlKVConnector(self.endpoint, self.cache, 30.0, time.monotonic)
        self.slab = EmbeddingSlab(8 << 20, 8, torch.float32)
        self.embedding = NixlEmbeddingConnector(self.endpoint, self.slab, "m", 30.0, time.monotonic)

    @property
    def num_claimed_words(self) -> int:
        """Lease words that stand, without the endpoint's own."""
        return int(self.endpoint._words.memory[:_NUM_LEASE_WORDS].count_nonzero()) - 1

    def close(self) -> None:
        self.kv.close()
        self.embedding.close()
        self.endpoint.close()
        assert (self.kv.num_live, self.embedding.num_live, self.slab.used_bytes) == (0, 0, 0)
        assert (self.kv.num_targets, self.num_claimed_words) == (0, 0)


@contextmanager
def replica(name: str, seed: int, **options: Any) -> Iterator[Replica]:
    made = Replica(name, seed=seed, **options)
    try:
        yield made
    finally:
        made.close()


# -- Memory that is reused under a read --------------------------------------------------------------------------------


class InterruptedEndpoint(NixlEndpoint):
    """Lets the test act between the read of the data and the read of the lease word."""

    def interrupt(self) -> None: ...

    def _read_batches(self, there: PeerMemory, moves: Moves, local: Region, stop: threading.Event) -> Steps[None]:
        yield from super()._read_batches(there, moves, local, stop)
        self.interrupt()


async def test_blocks_overwritten_just_before_validation_are_not_taken_for_data() -> None:
    with replica("owner", 1) as owner, replica("fetcher", 2) as fetcher:
        handle = owner.kv.publish([3, 4, 9], 40, 0, lambda: owner.cache.blocks.fill_(7.0))
        endpoint = InterruptedEndpoint("fetcher")
        kv = NixlKVConnector(endpoint, make_cache(3), 30.0, time.monotonic)
        endpoint.interrupt = lambda: owner.kv.release(handle.handle_id)  # type: ignore[method-assign]
        with pytest.raises(HandleExpiredError):
            await kv.fetch(handle, [0, 1, 2])
        # A new claim on the same blocks, under the same lease word, does not validate the old handle either.
        owner.kv.publish([3, 4, 9], 40, 0, lambda: None)
        with pytest.raises(HandleExpiredError):
            await fetcher.kv.fetch(handle, [0, 1, 2])
        kv.close()
        endpoint.close()


async def test_the_word_is_revoked_before_the_memory_is_freed() -> None:
    with replica("owner", 1) as owner, replica("fetcher", 2) as fetcher:
        expected = owner.cache.blocks[5].clone()
        words_at_free: list[int] = []

        def on_free() -> None:
            words_at_free.append(owner.num_claimed_words)

        handle = owner.kv.publish([5], 16, 0, on_free)
        await fetcher.kv.fetch(handle, [5])
        assert torch.equal(fetcher.cache.blocks[5], expected)
        assert owner.num_claimed_words == 1
        owner.kv.release(handle.handle_id)
        assert words_at_free == [0]


async def test_a_handle_of_another_version_is_refused_in_words() -> None:
    with replica("owner", 1) as owner, replica("fetcher", 2) as fetcher:
        handle = owner.kv.publish([5], 16, 0, lambda: None)
        for transport in (b"", b"\x80\x04pickle", handle.transport[:40], handle.transport[:-16]):
            with pytest.raises(IncompatiblePeerError, match="run the same version"):
                await fetcher.kv.fetch(_with(handle, transport), [0])


def _with(handle: KVHandle, transport: bytes) -> KVHandle:
    return replace(handle, transport=transport)


async def test_a_large_embedding_passes_through_the_receive_area_in_pieces() -> None:
    with replica("owner", 1) as owner, replica("fetcher", 2) as fetcher:
        values = torch.randn((200_000, 8), generator=torch.Generator().manual_seed(0))  # 6.4 MB: two pieces.
        handle = owner.embedding.publish("large", values)
        fetched = await asyncio.gather(*(fetcher.embedding.fetch(handle) for _ in range(6)))
        assert all(torch.equal(each, values) for each in fetched)
        assert fetcher.endpoint._receive_ranges.used_bytes == 0


async def test_memory_registered_too_late_for_peers_to_learn_of_is_refused() -> None:
    with replica("owner", 1) as owner:
        owner.kv.publish([5], 16, 0, lambda: None)
        with pytest.raises(RuntimeError, match="before the first handle"):
            owner.endpoint.register(torch.zeros(8))


# -- Another process ---------------------------------------------------------------------------------------------------


def serve_owner(connection: Connection) -> None:
    """A replica in a process of its own: does what it is asked, until told to stop or killed."""
    owner = Replica("owner", seed=1)
    handles: list[KVHandle | EmbeddingHandle] = []
    while (asked := connection.recv()) != "stop":
        if asked == "accept":
            connection.send(owner.kv.accept(list(range(NUM_BLOCKS)), 0))
        elif asked == "land":
            target_id = connection.recv()
            asyncio.run(owner.kv.landed(target_id))
            owner.kv.close_target(target_id)
            connection.send(owner.cache.blocks.clone())
        elif asked == "introduce":
            connection.send(owner.kv.introduction())
        elif asked == "push":
            target, block_ids, first_block, is_last = connection.recv()
            connection.send("starting")
            connection.send(asyncio.run(owner.kv.push(target, block_ids, first_block, is_last=is_last)))
        elif asked == "push for ever":
            target = connection.recv()
            connection.send("starting")
            while True:
                asyncio.run(owner.kv.push(target, list(range(target.num_blocks)), 0, is_last=False))
        if asked == "publish":
            handles.append(owner.kv.publish(list(range(0, NUM_BLOCKS, 2)), 500, 0, lambda: None))
            handles.append(owner.embedding.publish("a", torch.arange(80.0).view(10, 8)))
            connection.send(handles[-2:])
        elif asked == "release":
            for handle in handles:
                owner.kv.release(handle.handle_id)
                owner.embedding.release(handle.handle_id)
            connection.send((owner.kv.num_live, owner.embedding.live_bytes))
    owner.close()


@contextmanager
def owner_process() -> Iterator[tuple[Any, Connection]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_owner, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        if process.is_alive():
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
        process.join()
        ours.close()


async def test_an_owner_in_another_process_is_read_and_its_death_is_noticed() -> None:
    with replica("other", 3) as other, replica("fetcher", 2) as fetcher, owner_process() as (process, connection):
        connection.send("publish")
        kv_handle, embedding_handle = connection.recv()
        result = await fetcher.kv.fetch(kv_handle, list(range(32)))
        assert result.num_bytes == kv_handle.nbytes
        assert torch.equal(fetcher.cache.blocks[:32], make_cache(1).blocks[::2])
        assert torch.equal(await fetcher.embedding.fetch(embedding_handle), torch.arange(80.0).view(10, 8))

        connection.send("release")
        assert connection.recv() == (0, 0)
        with pytest.raises(HandleExpiredError):
            await fetcher.kv.fetch(kv_handle, list(range(32)))

        connection.send("publish")
        kv_handle, embedding_handle = connection.recv()
        await fetcher.kv.fetch(kv_handle, list(range(32)))
        process.kill()
        process.join()
        async with asyncio.timeout(60):
            for _ in range(2):
                with pytest.raises(PeerLostError, match="replica owner cannot be reached"):
                    await fetcher.kv.fetch(kv_handle, list(range(32)))
                with pytest.raises(PeerLostError, match="replica owner cannot be reached"):
                    await fetcher.embedding.fetch(embedding_handle)
        kept = other.kv.publish([5], 16, 0, lambda: None)
        await fetcher.kv.fetch(kept, [6])
        assert torch.equal(fetcher.cache.blocks[6], other.cache.blocks[5])
        assert_at_rest(fetcher.endpoint)


async def test_an_owner_that_is_frozen_at_first_contact_is_given_up_and_met_again_when_it_thaws() -> None:
    with (
        replica("fetcher", 2, contact_timeout_s=0.2) as fetcher,
        owner_process() as (process, connection),
    ):
        connection.send("publish")
        kv_handle, _ = connection.recv()
        os.kill(process.pid, signal.SIGSTOP)
        before = fetcher.cache.blocks.clone()
        async with asyncio.timeout(60):
            for _ in range(2):
                with pytest.raises(PeerLostError):
                    await fetcher.kv.fetch(kv_handle, list(range(32)))
        assert fetcher.endpoint._stalled
        assert torch.equal(fetcher.cache.blocks, before)
        os.kill(process.pid, signal.SIGCONT)
        async with asyncio.timeout(60):
            while fetcher.endpoint._stalled:
                await asyncio.sleep(0.01)
                fetcher.kv.expire()
            await fetcher.kv.fetch(kv_handle, list(range(32)))
        assert torch.equal(fetcher.cache.blocks[:32], make_cache(1).blocks[::2])
        assert_at_rest(fetcher.endpoint)


async def test_closing_while_a_frozen_owner_may_still_write_keeps_the_memory_until_it_cannot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with replica("fetcher", 2, contact_timeout_s=0.2) as fetcher, owner_process() as (process, connection):
        connection.send("publish")
        kv_handle, _ = connection.recv()
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(PeerLostError):
            await fetcher.kv.fetch(kv_handle, [0], first_block=31)
        fetcher.endpoint.close()
        assert "still under way" in caplog.text
        (closing,) = (thread for thread in threading.enumerate() if thread.name == "epd-nixl-close")
        assert closing.is_alive()
        process.kill()
        closing.join(60)
        assert not closing.is_alive()
        assert not fetcher.endpoint._stalled


# -- Pushing between processes -----------------------------------------------------------------------------------------

EVERY_BLOCK = list(range(NUM_BLOCKS))


async def test_another_process_pushes_here_and_the_notice_comes_with_the_data() -> None:
    with replica("reader", 2) as reader, owner_process() as (_, connection):
        target = reader.kv.accept(EVERY_BLOCK[::-1], 0)
        for first, is_last in ((0, False), (32, True)):
            connection.send("push")
            connection.send((target, EVERY_BLOCK[first : first + 32], first, is_last))
            assert connection.recv() == "starting"
            if is_last:
                await reader.kv.landed(target.target_id)
                assert torch.equal(reader.cache.blocks, make_cache(1).blocks.flip(0))
            assert connection.recv() == 32 * reader.cache.block_bytes
        reader.kv.close_target(target.target_id)


async def test_a_push_to_another_process_that_was_met_before_arrives_whole() -> None:
    with replica("writer", 2) as writer, owner_process() as (_, connection):
        connection.send("introduce")
        await writer.kv.meet(connection.recv())
        connection.send("accept")
        target = connection.recv()
        await writer.kv.push(target, EVERY_BLOCK, 0, is_last=True)
        connection.send("land")
        connection.send(target.target_id)
        assert torch.equal(connection.recv(), writer.cache.blocks)
        assert_at_rest(writer.endpoint)


async def test_a_writer_that_dies_leaves_its_target_open_and_others_unharmed() -> None:
    with replica("reader", 2) as reader, replica("other", 3) as other, owner_process() as (process, connection):
        dying = reader.kv.accept(EVERY_BLOCK[:32], 0)
        connection.send("push")
        connection.send((dying, EVERY_BLOCK[:16], 0, False))
        assert connection.recv() == "starting"
        connection.recv()
        process.kill()
        process.join()
        reader.kv._landing_timeout_s = 0.2
        with pytest.raises(TransferError, match="not complete: no notice within"):
            await reader.kv.landed(dying.target_id)
        assert reader.kv.num_targets == 1
        reader.kv.close_target(dying.target_id)  # The writer is dead: its blocks may be used again.
        target = reader.kv.accept(EVERY_BLOCK[:32], 0)
        await other.kv.push(target, EVERY_BLOCK[:32], 0, is_last=True)
        await reader.kv.landed(target.target_id)
        assert torch.equal(reader.cache.blocks[:32], other.cache.blocks[:32])
        reader.kv.close_target(target.target_id)


async def test_a_writer_killed_in_the_middle_of_writing_touches_only_its_target() -> None:
    with replica("reader", 2) as reader, owner_process() as (process, connection):
        into, others = EVERY_BLOCK[::2], EVERY_BLOCK[1::2]
        untouched, written = reader.cache.blocks[others].clone(), make_cache(1).blocks[:32]
        target = reader.kv.accept(into, 0)
        connection.send("push for ever")
        connection.send(target)
        assert connection.recv() == "starting"
        async with asyncio.timeout(60):
            while not torch.equal(reader.cache.blocks[into], written):  # noqa: ASYNC110 - nothing tells of a write.
                await asyncio.sleep(0.001)
        process.kill()
        process.join()
        assert torch.equal(reader.cache.blocks[others], untouched)
        reader.kv.close_target(target.target_id)
        reader.cache.blocks.zero_()
        await push_one_block(reader)
        reader.cache.blocks[0].zero_()
        assert not reader.cache.blocks.any()


async def push_one_block(reader: Replica) -> None:
    """Let anything that was left behind have its turn."""
    with replica("passer-by", 3) as writer:
        target = reader.kv.accept([0], 0)
        await writer.kv.push(target, [5], 0, is_last=True)
        await reader.kv.landed(target.target_id)
        reader.kv.close_target(target.target_id)


async def test_a_frozen_writer_goes_on_when_it_thaws_and_its_late_notice_still_counts() -> None:
    with replica("reader", 2) as reader, owner_process() as (process, connection):
        target = reader.kv.accept(EVERY_BLOCK[:32], 0)
        connection.send("push")
        connection.send((target, EVERY_BLOCK[:16], 0, False))
        assert connection.recv() == "starting"
        connection.recv()
        os.kill(process.pid, signal.SIGSTOP)
        connection.send("push")
        connection.send((target, EVERY_BLOCK[16:32], 16, True))
        reader.kv._landing_timeout_s = 0.2
        with pytest.raises(TransferError, match="no notice within"):
            await reader.kv.landed(target.target_id)
        os.kill(process.pid, signal.SIGCONT)
        reader.kv._landing_timeout_s = 60
        await reader.kv.landed(target.target_id)
        assert torch.equal(reader.cache.blocks[:32], make_cache(1).blocks[:32])
        reader.kv.close_target(target.target_id)


async def test_a_writer_that_thaws_after_its_target_was_closed_writes_nothing() -> None:
    with replica("reader", 2) as reader, owner_process() as (process, connection):
        target = reader.kv.accept(EVERY_BLOCK, 0)
        os.kill(process.pid, signal.SIGSTOP)
        connection.send("push")
        connection.send((target, EVERY_BLOCK, 0, True))
        reader.kv.close_target(target.target_id)
        before = reader.cache.blocks.clone()
        os.kill(process.pid, signal.SIGCONT)
        assert connection.recv() == "starting"
        process.join(60)  # It ends with HandleExpiredError.
        assert process.exitcode == 1
        assert torch.equal(reader.cache.blocks, before)


async def test_a_reader_frozen_at_first_contact_is_given_up_and_pushed_to_when_it_thaws() -> None:
    with replica("writer", 2, contact_timeout_s=0.2) as writer, owner_process() as (process, connection):
        connection.send("accept")
        target = connection.recv()
        os.kill(process.pid, signal.SIGSTOP)
        async with asyncio.timeout(60):
            for _ in range(2):
                with pytest.raises(PeerLostError):
                    await writer.kv.push(target, EVERY_BLOCK, 0, is_last=True)
        os.kill(process.pid, signal.SIGCONT)
        async with asyncio.timeout(60):
            while writer.endpoint._stalled:
                await asyncio.sleep(0.01)
                writer.kv.expire()
            await writer.kv.push(target, EVERY_BLOCK, 0, is_last=True)
        connection.send("land")
        connection.send(target.target_id)
        assert torch.equal(connection.recv(), writer.cache.blocks)
        assert_at_rest(writer.endpoint)


async def test_a_reader_that_died_is_told_and_its_successor_is_pushed_to() -> None:
    with replica("writer", 2) as writer:
        for _ in range(2):
            with owner_process() as (process, connection):
                connection.send("accept")
                target = connection.recv()
                await writer.kv.push(target, EVERY_BLOCK, 0, is_last=True)
                connection.send("land")
                connection.send(target.target_id)
                assert torch.equal(connection.recv(), writer.cache.blocks)
                assert len(writer.endpoint._peers) == 1
                connection.send("accept")
                target = connection.recv()
                process.kill()
                process.join()
                async with asyncio.timeout(60):
                    with pytest.raises(PeerLostError, match="replica owner cannot be reached"):
                        await writer.kv.push(target, EVERY_BLOCK, 0, is_last=True)
        assert_at_rest(writer.endpoint)


async def test_a_push_cancelled_between_batches_sends_no_notice_and_writes_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("epd.transfer.nixl_endpoint._MAX_BATCH_BYTES", 4096)
    with replica("reader", 2) as reader, replica("writer", 1) as writer:
        target = reader.kv.accept(EVERY_BLOCK, 0)
        posted = []
        post = writer.endpoint._agent.post

        def post_and_cancel(operation: Any, *args: Any, **options: Any) -> Any:
            result = post(operation, *args, **options)
            posted.append((operation, options["notice"]))
            if operation == "WRITE":
                loop.call_soon_threadsafe(pushing.cancel)
            return result

        writer.endpoint._agent.post = post_and_cancel  # type: ignore[method-assign]
        loop = asyncio.get_running_loop()
        pushing = asyncio.create_task(writer.kv.push(target, EVERY_BLOCK, 0, is_last=True))
        with pytest.raises(asyncio.CancelledError):
            await pushing
        num_posted = len(posted)
        reader.cache.blocks.zero_()
        writer.endpoint._agent.post = post  # type: ignore[method-assign]
        assert 2 <= num_posted < NUM_BLOCKS * reader.cache.block_bytes // 4096
        assert all(notice == b"" for _, notice in posted)
        reader.kv.close_target(target.target_id)
        await push_one_block(reader)
        reader.cache.blocks[0].zero_()
        assert not reader.cache.blocks.any()


def assert_at_rest(endpoint: NixlEndpoint) -> None:
    assert not endpoint._stalled
    assert all(peer.num_active == 0 and peer.num_stalled == 0 for peer in endpoint._peers.values())
    assert endpoint._receive_ranges.used_bytes == 0
    assert len(endpoint._words.free_scratch) == 1024
