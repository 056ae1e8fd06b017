"""What every connector promises, run over all of them.

If these fail, users get answers computed from other requests' memory, or replicas that fill up and never recover.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

from epd.cache.kv_cache import KVCache, allocate_kv_cache
from epd.errors import ConfigError, HandleExpiredError, IncompatiblePeerError, PeerLostError, TransferError
from epd.transfer.base import EmbeddingConnector, KVConnector
from epd.transfer.by_reference import ByReferenceKVConnector
from epd.transfer.factory import Connectors, build_connectors, resolve_backend
from epd.transfer.in_process import InProcessPeers
from epd.types import EmbeddingHandle, KVHandle, KVSpec, KVTarget

WIDTH = 24
SLAB_BYTES = 64 * 1024
LEASE_S = 30.0


def _has_nixl() -> bool:
    try:
        return resolve_backend("nixl") == "nixl"
    except ConfigError:
        return False


HAS_NIXL = _has_nixl()


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Replica:
    name: str
    kv_cache: KVCache
    connectors: Connectors

    @property
    def kv(self) -> KVConnector:
        assert self.connectors.kv is not None
        return self.connectors.kv

    @property
    def embedding(self) -> EmbeddingConnector:
        assert self.connectors.embedding is not None
        return self.connectors.embedding

    @property
    def blocks(self) -> torch.Tensor:
        return self.kv_cache.blocks


@dataclass
class Cluster:
    """Replicas in one process, connected by one backend."""

    backend: str
    clock: Clock = field(default_factory=Clock)
    peers: InProcessPeers = field(default_factory=InProcessPeers)
    replicas: list[Replica] = field(default_factory=list)

    def add(self, name: str, *, dtype: str = "float32", model: str = "model@1", block_size: int = 4) -> Replica:
        spec = KVSpec(2, 1, 8, dtype, getattr(torch, dtype).itemsize)
        kv_cache = allocate_kv_cache(spec, block_size=block_size, num_blocks=32, model_fingerprint=model)
        generator = torch.Generator().manual_seed(len(self.replicas))
        kv_cache.blocks.copy_(torch.randn(kv_cache.blocks.shape, generator=generator))
        connectors = build_connectors(
            self.backend,  # type: ignore[arg-type]
            owner=name,
            kv_cache=kv_cache,
            embedding_slab_bytes=SLAB_BYTES,
            embedding_layout=f"{model}/{dtype}/{WIDTH}",
            embedding_width=WIDTH,
            embedding_dtype=dtype,
            lease_s=LEASE_S,
            peers=self.peers,
            clock=self.clock,
        )
        self.peers.add(name, connectors.kv, connectors.embedding)
        self.replicas.append(Replica(name, kv_cache, connectors))
        return self.replicas[-1]

    def lose(self, replica: Replica) -> None:
        """Let a replica go, as a peer sees it."""
        self.peers.remove(replica.name)
        self.replicas.remove(replica)
        replica.connectors.close()


@pytest.fixture(
    params=[
        "by_reference",
        pytest.param("nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="nixl is not installed or does not work")),
    ]
)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    yield from check_at_rest(Cluster(request.param))


def check_at_rest(cluster: Cluster) -> Iterator[Cluster]:
    """Lend a cluster to a test, and see afterwards that nothing is left claimed."""
    yield cluster
    for replica in cluster.replicas:
        assert replica.kv.num_targets == 0, "a test that is done with a target closes it"
        replica.connectors.close()
        assert (replica.kv.num_live, replica.kv.live_bytes, replica.kv.num_targets) == (0, 0, 0)
        assert (replica.embedding.num_live, replica.embedding.live_bytes) == (0, 0)


class Frees:
    """Counts calls to ``on_free``."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def publish(replica: Replica, block_ids: list[int], on_free: Callable[[], None] = lambda: None) -> KVHandle:
    num_tokens = len(block_ids) * replica.kv_cache.block_size - 1
    return replica.kv.publish(block_ids, num_tokens, -3, on_free)


def embedding(num_tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((num_tokens, WIDTH), generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- KV: what arrives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_scattered_blocks_arrive_equal_and_in_order(cluster: Cluster, dtype: str) -> None:
    owner, fetcher = cluster.add("owner", dtype=dtype), cluster.add("fetcher", dtype=dtype)
    untouched = fetcher.blocks.clone()
    source, into = [7, 8, 9, 2, 30, 3], [0, 1, 20, 21, 22, 5]
    handle = publish(owner, source)
    result = await fetcher.kv.fetch(handle, into)
    assert result.num_bytes == handle.nbytes == 6 * owner.kv_cache.block_bytes
    assert result.failed == ()
    assert torch.equal(fetcher.blocks[into], owner.blocks[source])
    others = [block_id for block_id in range(32) if block_id not in into]
    assert torch.equal(fetcher.blocks[others], untouched[others])


async def test_a_handle_tells_what_decode_needs(cluster: Cluster) -> None:
    owner = cluster.add("owner")
    handle = owner.kv.publish([4, 5], 6, -11, lambda: None)
    assert (handle.owner, handle.num_tokens, handle.num_blocks, handle.rotary_delta) == ("owner", 6, 2, -11)
    assert handle.lease_s == LEASE_S
    assert handle.backend == owner.kv.backend


async def test_a_decode_replica_fetches_only_the_blocks_that_it_lacks(cluster: Cluster) -> None:
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    handle = publish(owner, [1, 2, 3, 11, 12])
    result = await fetcher.kv.fetch(handle, [9, 8], first_block=2)
    assert torch.equal(fetcher.blocks[[9, 8]], owner.blocks[[3, 11]])
    assert result.num_bytes == 2 * owner.kv_cache.block_bytes
    assert (await fetcher.kv.fetch(handle, [], first_block=5)).num_bytes == 0


async def test_a_replica_fetches_from_itself(cluster: Cluster) -> None:
    replica = cluster.add("both")
    handle = publish(replica, [1, 2])
    await replica.kv.fetch(handle, [20, 10])
    assert torch.equal(replica.blocks[[20, 10]], replica.blocks[[1, 2]])
    shown = replica.embedding.publish("a", embedding(5))
    assert torch.equal(await replica.embedding.fetch(shown), embedding(5))


async def test_many_fetches_at_once_do_not_mix(cluster: Cluster) -> None:
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    handles = [publish(owner, [block_id]) for block_id in range(32)]
    await asyncio.gather(*(fetcher.kv.fetch(handle, [31 - i]) for i, handle in enumerate(handles)))
    assert torch.equal(fetcher.blocks, owner.blocks.flip(0))


async def test_blocks_outside_a_handle_or_the_cache_are_refused(cluster: Cluster) -> None:
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    handle = publish(owner, [1, 2])
    with pytest.raises(ValueError, match="outside a handle"):
        await fetcher.kv.fetch(handle, [1, 2], first_block=1)
    with pytest.raises(ValueError, match="outside the cache"):
        await fetcher.kv.fetch(handle, [1, 32])
    with pytest.raises(ValueError, match="outside the cache"):
        publish(owner, [-1])


# -- KV: how long it lasts ---------------------------------------------------------------------------------------------


async def test_two_claims_on_the_same_blocks_end_apart(cluster: Cluster) -> None:
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    first_free, second_free = Frees(), Frees()
    first, second = publish(owner, [4, 6], first_free), publish(owner, [4, 6], second_free)
    assert first.handle_id != second.handle_id
    owner.kv.release(first.handle_id)
    assert (first_free.count, second_free.count) == (1, 0)
    await fetcher.kv.fetch(second, [0, 1])
    assert torch.equal(fetcher.blocks[[0, 1]], owner.blocks[[4, 6]])
    with pytest.raises(HandleExpiredError):
        await fetcher.kv.fetch(first, [2, 3])


async def test_release_is_idempotent_and_frees_once(cluster: Cluster) -> None:
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    on_free = Frees()
    handle = publish(owner, [3], on_free)
    assert (owner.kv.num_live, owner.kv.live_bytes) == (1, handle.nbytes)
    for _ in range(3):
        owner.kv.release(handle.handle_id)
    owner.kv.release("never published")
    assert on_free.count == 1
    assert (owner.kv.num_live, owner.kv.live_bytes) == (0, 0)
    with pytest.raises(HandleExpiredError):
        await fetcher.kv.fetch(handle, [3])
    with pytest.raises(HandleExpiredError):
        owner.kv.renew(handle.handle_id)
    with pytest.raises(HandleExpiredError):
        owner.kv.read(handle.handle_id, 0, 1)


async def test_a_lease_runs_out_on_the_owners_clock(cluster: Cluster) -> None:
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    on_free = Frees()
    handle = publish(owner, [3], on_free)
    cluster.clock.now_s += LEASE_S - 1
    assert owner.kv.expire() == 0
    cluster.clock.now_s += 1
    assert owner.kv.expire() == 1
    owner.kv.release(handle.handle_id)
    assert on_free.count == 1
    with pytest.raises(HandleExpiredError):
        await fetcher.kv.fetch(handle, [3])


async def test_renewing_extends_a_lease(cluster: Cluster) -> None:
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    handle = publish(owner, [3])
    for _ in range(3):
        cluster.clock.now_s += 0.8 * LEASE_S
        await cluster.peers.renew("owner", [handle.handle_id])
        assert owner.kv.expire() == 0
    await fetcher.kv.fetch(handle, [9])
    assert torch.equal(fetcher.blocks[9], owner.blocks[3])


async def test_a_reused_block_is_never_taken_for_the_old_one(cluster: Cluster) -> None:
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    stale = publish(owner, [3], lambda: owner.blocks[3].fill_(7.0))
    owner.kv.release(stale.handle_id)
    fresh = publish(owner, [3])
    with pytest.raises(HandleExpiredError):
        await fetcher.kv.fetch(stale, [3])
    await fetcher.kv.fetch(fresh, [3])
    assert (fetcher.blocks[3] == 7.0).all()


async def test_closing_frees_every_claim_once_and_refuses_new_ones(cluster: Cluster) -> None:
    owner = cluster.add("owner")
    on_free = Frees()
    for _ in range(3):
        publish(owner, [1], on_free)
    owner.kv.close()
    owner.kv.close()
    assert on_free.count == 3
    with pytest.raises(TransferError, match="shutting down"):
        publish(owner, [1], on_free)
    assert on_free.count == 3


async def test_a_closed_replica_fetches_nothing(cluster: Cluster) -> None:
    owner, closed = cluster.add("owner"), cluster.add("closed")
    kv_handle, embedding_handle = publish(owner, [1]), owner.embedding.publish("a", embedding(3))
    closed.connectors.close()
    with pytest.raises(TransferError, match="shutting down"):
        await closed.kv.fetch(kv_handle, [1])
    with pytest.raises(TransferError, match="shutting down"):
        await closed.embedding.fetch(embedding_handle)


# -- KV: what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("difference", "values"),
    [
        ({"model": "model@2"}, ("model=model@2", "model=model@1")),
        ({"dtype": "bfloat16"}, ("dtype=bfloat16", "dtype=float32")),
        ({"block_size": 8}, ("block_size=8", "block_size=4")),
    ],
)
async def test_another_layout_is_refused_with_both_sides_values(
    cluster: Cluster, difference: dict[str, object], values: tuple[str, str]
) -> None:
    owner, fetcher = cluster.add("owner", **difference), cluster.add("fetcher")  # type: ignore[arg-type]
    before = fetcher.blocks.clone()
    with pytest.raises(IncompatiblePeerError) as caught:
        await fetcher.kv.fetch(publish(owner, [1]), [1])
    assert str(caught.value) == (
        f"replica owner has KV blocks of {values[0]}, but replica fetcher expects {values[1]}: "
        "check that both run the same engine.block_size, model, revision, dtype and package version"
    )
    assert torch.equal(fetcher.blocks, before)


async def test_another_backend_is_refused_in_words(cluster: Cluster) -> None:
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    handle = replace(publish(owner, [1]), backend="pigeon")
    with pytest.raises(IncompatiblePeerError, match=r"over pigeon.*args\.transfer\.backend"):
        await fetcher.kv.fetch(handle, [1])


async def test_a_lost_owner_fails_the_fetch_fast_and_harms_nobody_else(cluster: Cluster) -> None:
    owner, other, fetcher = cluster.add("owner"), cluster.add("other"), cluster.add("fetcher")
    handle, kept = publish(owner, [1, 2]), publish(other, [5])
    await fetcher.kv.fetch(handle, [1, 2])
    cluster.lose(owner)
    async with asyncio.timeout(30):  # A dead peer must not be waited for.
        for _ in range(3):
            with pytest.raises((PeerLostError, HandleExpiredError)):
                await fetcher.kv.fetch(handle, [1, 2])
    await fetcher.kv.fetch(kept, [3])
    assert torch.equal(fetcher.blocks[3], other.blocks[5])


async def test_a_restarted_owner_is_met_anew(cluster: Cluster) -> None:
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    old = publish(owner, [1])
    await fetcher.kv.fetch(old, [1])
    cluster.lose(owner)
    restarted = cluster.add("owner")
    with pytest.raises((PeerLostError, HandleExpiredError)):
        await fetcher.kv.fetch(old, [1])
    await fetcher.kv.fetch(publish(restarted, [2]), [2])
    assert torch.equal(fetcher.blocks[2], restarted.blocks[2])


async def test_a_cancelled_fetch_writes_nothing_after_it_has_unwound(cluster: Cluster) -> None:
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    handle = publish(owner, list(range(16)))
    await fetcher.kv.fetch(handle, list(range(16)))
    for num_turns in range(8):
        task = asyncio.create_task(fetcher.kv.fetch(handle, list(range(16))))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        fetcher.blocks.fill_(num_turns)
        await fetcher.kv.fetch(handle, [31])  # Whatever was left behind has had its turn when this is done.
        assert (fetcher.blocks[:16] == num_turns).all()


async def test_a_failing_read_holds_no_claim(cluster: Cluster) -> None:
    owner = cluster.add("owner")
    on_free = Frees()
    handle = publish(owner, [1], on_free)
    with pytest.raises(ValueError, match="outside a handle"):
        owner.kv.read(handle.handle_id, 0, 2)
    owner.kv.release(handle.handle_id)
    assert on_free.count == 1


# -- KV: pushed instead ------------------------------------------------------------------------------------------------


@pytest.fixture
def pushing() -> Iterator[Cluster]:
    """A cluster of each backend that supports pushing."""
    if not HAS_NIXL:
        pytest.skip("nixl is not installed or does not work")
    yield from check_at_rest(Cluster("nixl"))


async def push(writer: Replica, target: KVTarget, block_ids: list[int], chunk: int = 1000) -> int:
    """Push a whole prompt's blocks in chunks, as prefill does."""
    num_bytes = 0
    for first in range(0, len(block_ids), chunk):
        ids = block_ids[first : first + chunk]
        num_bytes += await writer.kv.push(target, ids, first, is_last=first + len(ids) == len(block_ids))
    return num_bytes


@pytest.mark.parametrize("chunk", [1, 2, 4, 9])
@pytest.mark.parametrize(
    ("source", "into"),
    [
        ([4, 5, 6, 7, 8, 9], [20, 21, 22, 23, 24, 25]),
        ([7, 8, 9, 2, 30, 3], [0, 1, 20, 21, 22, 5]),
        ([31], [0]),
    ],
)
async def test_pushed_blocks_land_equal_and_in_order(
    pushing: Cluster, source: list[int], into: list[int], chunk: int
) -> None:
    writer, reader = pushing.add("writer"), pushing.add("reader")
    untouched = reader.blocks.clone()
    target = reader.kv.accept(into, 0)
    assert (target.owner, target.first_block, target.num_blocks) == ("reader", 0, len(into))
    assert await push(writer, target, source, chunk) == len(into) * writer.kv_cache.block_bytes
    await reader.kv.landed(target.target_id)
    assert torch.equal(reader.blocks[into], writer.blocks[source])
    others = [block_id for block_id in range(32) if block_id not in into]
    assert torch.equal(reader.blocks[others], untouched[others])
    reader.kv.close_target(target.target_id)
    assert reader.kv.num_targets == 0


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
async def test_blocks_that_the_reader_has_cached_are_not_pushed(pushing: Cluster, chunk: int) -> None:
    writer, reader = pushing.add("writer"), pushing.add("reader")
    target = reader.kv.accept([9, 8], first_block=3)
    untouched = reader.blocks.clone()
    assert await push(writer, target, [1, 2, 3, 11, 12], chunk) == 2 * writer.kv_cache.block_bytes
    await reader.kv.landed(target.target_id)
    assert torch.equal(reader.blocks[[9, 8]], writer.blocks[[11, 12]])
    untouched[[9, 8]] = writer.blocks[[11, 12]]
    assert torch.equal(reader.blocks, untouched)
    reader.kv.close_target(target.target_id)


async def test_a_prompt_that_the_reader_has_whole_is_only_announced(pushing: Cluster) -> None:
    writer, reader = pushing.add("writer"), pushing.add("reader")
    target = reader.kv.accept([], first_block=3)
    assert await push(writer, target, [1, 2, 3]) == 0
    await reader.kv.landed(target.target_id)
    reader.kv.close_target(target.target_id)


async def test_the_last_push_may_be_empty(pushing: Cluster) -> None:
    writer, reader = pushing.add("writer"), pushing.add("reader")
    target = reader.kv.accept([5, 6], 0)
    await writer.kv.push(target, [1, 2], 0, is_last=False)
    assert await writer.kv.push(target, [], 2, is_last=True) == 0
    await reader.kv.landed(target.target_id)
    assert torch.equal(reader.blocks[[5, 6]], writer.blocks[[1, 2]])
    reader.kv.close_target(target.target_id)


async def test_a_replica_pushes_to_itself(pushing: Cluster) -> None:
    replica = pushing.add("both")
    target = replica.kv.accept([20, 10, 11], first_block=1)
    await push(replica, target, [1, 2, 3, 4], 2)
    await replica.kv.landed(target.target_id)
    assert torch.equal(replica.blocks[[20, 10, 11]], replica.blocks[[2, 3, 4]])
    replica.kv.close_target(target.target_id)
    with pytest.raises(HandleExpiredError):
        await push(replica, target, [1, 2, 3, 4])


async def test_nothing_has_landed_before_the_last_push(pushing: Cluster) -> None:
    writer, reader = pushing.add("writer"), pushing.add("reader")
    target = reader.kv.accept([5, 6], 0)
    await writer.kv.push(target, [1], 0, is_last=False)
    landing = asyncio.create_task(reader.kv.landed(target.target_id))
    fetched = publish(writer, [3])
    await reader.kv.fetch(fetched, [3])  # A notice, had one been sent, would be here by now.
    assert not landing.done()
    await writer.kv.push(target, [2], 1, is_last=True)
    await landing
    assert torch.equal(reader.blocks[[5, 6]], writer.blocks[[1, 2]])
    reader.kv.close_target(target.target_id)


async def test_two_hundred_pushes_at_once_do_not_mix(pushing: Cluster) -> None:
    writers, reader = [pushing.add(f"writer-{i}") for i in range(2)], pushing.add("reader")

    async def one(turn: int) -> None:
        block_id = turn % 32
        async with free[block_id]:
            target = reader.kv.accept([block_id], 0)
            writer = writers[turn // 32 % 2]
            await asyncio.gather(push(writer, target, [31 - block_id]), reader.kv.landed(target.target_id))
            assert torch.equal(reader.blocks[block_id], writer.blocks[31 - block_id])
            reader.kv.close_target(target.target_id)

    free = [asyncio.Lock() for _ in range(32)]
    await asyncio.gather(*(one(turn) for turn in range(200)))
    assert reader.kv.num_targets == 0


async def test_a_closed_target_takes_nothing_and_its_notice_is_dropped(pushing: Cluster) -> None:
    writer, reader = pushing.add("writer"), pushing.add("reader")
    closed, opened = reader.kv.accept([5], 0), reader.kv.accept([6], 0)
    await push(writer, closed, [1])
    for _ in range(2):
        reader.kv.close_target(closed.target_id)
    reader.kv.close_target("never opened")
    before = reader.blocks.clone()
    with pytest.raises(HandleExpiredError, match="is closed"):
        await push(writer, closed, [2])
    with pytest.raises(HandleExpiredError, match="is closed"):
        await reader.kv.landed(closed.target_id)
    assert torch.equal(reader.blocks, before)
    await push(writer, opened, [2])
    await reader.kv.landed(opened.target_id)  # Collects both notices.
    assert torch.equal(reader.blocks[6], writer.blocks[2])
    with pytest.raises(HandleExpiredError, match="is closed"):
        await reader.kv.landed(closed.target_id)
    reader.kv.close_target(opened.target_id)


async def test_target_ids_are_not_guessed_or_repeated(pushing: Cluster) -> None:
    reader = pushing.add("reader")
    targets = [reader.kv.accept([1], 0) for _ in range(100)]
    assert len({target.target_id for target in targets}) == 100
    assert min(len(target.target_id) for target in targets) >= 32
    for target in targets:
        reader.kv.close_target(target.target_id)


async def test_pushes_outside_the_target_or_the_cache_are_refused(pushing: Cluster) -> None:
    writer, reader = pushing.add("writer"), pushing.add("reader")
    before = reader.blocks.clone()
    target = reader.kv.accept([1, 2], first_block=1)
    with pytest.raises(ValueError, match="outside a target that ends at block 3"):
        await writer.kv.push(target, [1, 2], 2, is_last=True)
    with pytest.raises(ValueError, match="ends at block 2, but the target at block 3"):
        await writer.kv.push(target, [1, 2], 0, is_last=True)
    with pytest.raises(ValueError, match="outside the cache"):
        await writer.kv.push(target, [32], 1, is_last=False)
    with pytest.raises(ValueError, match="outside the cache"):
        reader.kv.accept([32], 0)
    assert torch.equal(reader.blocks, before)
    reader.kv.close_target(target.target_id)


async def test_a_target_of_another_layout_or_backend_is_refused_with_both_sides_values(pushing: Cluster) -> None:
    writer, reader = pushing.add("writer"), pushing.add("reader", block_size=8)
    before = reader.blocks.clone()
    target = reader.kv.accept([1], 0)
    with pytest.raises(
        IncompatiblePeerError, match=r"reader has .* block_size=8, but replica writer .* block_size=4: "
    ):
        await push(writer, target, [1])
    with pytest.raises(IncompatiblePeerError, match=r"over pigeon.*args\.transfer\.backend"):
        await push(writer, replace(target, backend="pigeon"), [1])
    ours = replace(target, layout=writer.kv_cache.layout)
    with pytest.raises(IncompatiblePeerError, match="run the same version"):
        await push(writer, ours, [1])
    assert torch.equal(reader.blocks, before)
    reader.kv.close_target(target.target_id)


async def test_a_lost_reader_fails_the_push_fast_and_harms_nobody_else(pushing: Cluster) -> None:
    reader, other, writer = pushing.add("reader"), pushing.add("other"), pushing.add("writer")
    target, kept = reader.kv.accept([1, 2], 0), other.kv.accept([5], 0)
    await writer.kv.push(target, [1], 0, is_last=False)
    pushing.lose(reader)
    async with asyncio.timeout(30):
        for _ in range(3):
            with pytest.raises((PeerLostError, HandleExpiredError)):
                await writer.kv.push(target, [2], 1, is_last=True)
    await push(writer, kept, [3])
    await other.kv.landed(kept.target_id)
    assert torch.equal(other.blocks[5], writer.blocks[3])
    other.kv.close_target(kept.target_id)


async def test_a_restarted_reader_is_met_anew(pushing: Cluster) -> None:
    reader, writer = pushing.add("reader"), pushing.add("writer")
    await push(writer, old := reader.kv.accept([1], 0), [1])
    pushing.lose(reader)
    restarted = pushing.add("reader")
    with pytest.raises((PeerLostError, HandleExpiredError)):
        await push(writer, old, [1])
    target = restarted.kv.accept([2], 0)
    await push(writer, target, [2])
    await restarted.kv.landed(target.target_id)
    assert torch.equal(restarted.blocks[2], writer.blocks[2])
    restarted.kv.close_target(target.target_id)


async def test_a_cancelled_push_writes_nothing_after_it_has_unwound(pushing: Cluster) -> None:
    writer, reader = pushing.add("writer"), pushing.add("reader")
    into = list(range(16))
    for num_turns in range(8):
        target = reader.kv.accept(into, 0)
        task = asyncio.create_task(push(writer, target, into))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        reader.blocks.fill_(num_turns)
        kept = reader.kv.accept([31], 0)
        await push(writer, kept, [31])  # Whatever was left behind has had its turn when this is done.
        await reader.kv.landed(kept.target_id)
        assert (reader.blocks[:16] == num_turns).all()
        reader.kv.close_target(target.target_id)
        reader.kv.close_target(kept.target_id)


async def test_closing_a_replica_closes_its_targets(pushing: Cluster) -> None:
    reader = pushing.add("reader")
    target = reader.kv.accept([1], 0)
    landing = asyncio.create_task(reader.kv.landed(target.target_id))
    await asyncio.sleep(0)
    reader.connectors.close()
    with pytest.raises(TransferError):
        await landing
    assert reader.kv.num_targets == 0
    with pytest.raises(TransferError, match="shutting down"):
        reader.kv.accept([1], 0)
    reader.kv.close_target(target.target_id)


# -- KV: contact ahead of the first transfer ---------------------------------------------------------------------------


async def test_replicas_that_have_met_transfer_both_ways(cluster: Cluster) -> None:
    first, second = cluster.add("first"), cluster.add("second")
    for _ in range(2):
        await first.kv.meet(second.kv.introduction())
        await first.kv.meet(first.kv.introduction())
    await second.kv.fetch(publish(first, [1]), [2])
    await first.kv.fetch(publish(second, [3]), [4])
    assert torch.equal(second.blocks[2], first.blocks[1])
    assert torch.equal(first.blocks[4], second.blocks[3])


async def test_meeting_a_replica_of_another_layout_tells_both_sides_values(pushing: Cluster) -> None:
    ours, theirs = pushing.add("ours"), pushing.add("theirs", model="model@2")
    with pytest.raises(
        IncompatiblePeerError, match=r"theirs has KV blocks of model=model@2, .* ours expects model=model@1"
    ):
        await ours.kv.meet(theirs.kv.introduction())


async def test_an_introduction_that_is_not_understood_or_no_longer_true_is_told_so(pushing: Cluster) -> None:
    ours, theirs = pushing.add("ours"), pushing.add("theirs")
    introduction = theirs.kv.introduction()
    for broken in (b"", b"{}", b"[]\n", introduction[:-1], introduction[: introduction.index(b"\n") + 9]):
        with pytest.raises(IncompatiblePeerError, match="run the same version"):
            await ours.kv.meet(broken)
    pushing.lose(theirs)
    with pytest.raises(PeerLostError, match="replica theirs cannot be reached"):
        await ours.kv.meet(introduction)


# -- Embeddings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_embedding_arrives_equal_and_belongs_to_the_caller(cluster: Cluster, dtype: str) -> None:
    owner, fetcher = cluster.add("owner", dtype=dtype), cluster.add("fetcher", dtype=dtype)
    values = embedding(33, dtype=getattr(torch, dtype))
    handle = owner.embedding.publish("hash", values)
    assert (handle.mm_hash, handle.num_tokens, handle.nbytes) == ("hash", 33, values.nbytes)
    expected = values.clone()
    values.zero_()  # The caller's tensor is free once published.
    fetched = await fetcher.embedding.fetch(handle)
    assert torch.equal(fetched, expected)
    fetched.zero_()
    assert torch.equal(await fetcher.embedding.fetch(handle), expected)
    assert torch.equal(owner.embedding.read(handle.handle_id, 30, 2), expected[30:32])


async def test_equal_content_is_stored_once_and_claimed_apart(cluster: Cluster) -> None:
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    first = owner.embedding.publish("same", embedding(10))
    used_bytes = owner.embedding.live_bytes
    second = owner.embedding.publish("same", embedding(10))
    assert (owner.embedding.num_live, owner.embedding.live_bytes) == (2, used_bytes)
    owner.embedding.release(first.handle_id)
    owner.embedding.release(first.handle_id)
    assert torch.equal(await fetcher.embedding.fetch(second), embedding(10))
    with pytest.raises(HandleExpiredError):
        await fetcher.embedding.fetch(first)
    owner.embedding.release(second.handle_id)
    assert (owner.embedding.num_live, owner.embedding.live_bytes) == (0, 0)


async def test_a_full_slab_refuses_and_freed_room_is_used_again(cluster: Cluster) -> None:
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    num_tokens = SLAB_BYTES // (4 * WIDTH * 4)  # A quarter of the slab.
    handles = [owner.embedding.publish(f"{i}", embedding(num_tokens, i)) for i in range(4)]
    with pytest.raises(TransferError, match="no room to publish"):
        owner.embedding.publish("more", embedding(num_tokens))
    for i in (1, 2):
        owner.embedding.release(handles[i].handle_id)
    large = owner.embedding.publish("large", embedding(2 * num_tokens, 9))
    assert torch.equal(await fetcher.embedding.fetch(large), embedding(2 * num_tokens, 9))
    assert torch.equal(await fetcher.embedding.fetch(handles[3]), embedding(num_tokens, 3))


async def test_an_embeddings_lease_runs_out_and_is_renewed(cluster: Cluster) -> None:
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    renewed, forgotten = (owner.embedding.publish(name, embedding(3)) for name in ("a", "b"))
    cluster.clock.now_s += 0.8 * LEASE_S
    await cluster.peers.renew("owner", [renewed.handle_id])
    cluster.clock.now_s += 0.8 * LEASE_S
    assert owner.embedding.expire() == 1
    assert torch.equal(await fetcher.embedding.fetch(renewed), embedding(3))
    with pytest.raises(HandleExpiredError):
        await fetcher.embedding.fetch(forgotten)
    await cluster.peers.release("owner", [renewed.handle_id, forgotten.handle_id])
    assert owner.embedding.live_bytes == 0


async def test_an_embedding_of_another_model_or_size_is_refused(cluster: Cluster) -> None:
    owner, fetcher = cluster.add("owner", model="model@2"), cluster.add("fetcher")
    handle = owner.embedding.publish("a", embedding(3))
    with pytest.raises(IncompatiblePeerError, match=r"model@2/.*model@1/.*model, revision and dtype"):
        await fetcher.embedding.fetch(handle)
    ours: EmbeddingHandle = replace(handle, layout=f"model@1/float32/{WIDTH}", num_tokens=4)
    with pytest.raises(IncompatiblePeerError, match="bytes for 4 tokens"):
        await fetcher.embedding.fetch(ours)
    with pytest.raises(ValueError, match="expected an embedding"):
        owner.embedding.publish("b", torch.zeros(3, WIDTH + 1))


async def test_a_lost_owner_fails_an_embedding_fetch(cluster: Cluster) -> None:
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    handle = owner.embedding.publish("a", embedding(3))
    await fetcher.embedding.fetch(handle)
    cluster.lose(owner)
    for _ in range(2):
        with pytest.raises((PeerLostError, HandleExpiredError)):
            await fetcher.embedding.fetch(handle)


async def test_a_cancelled_embedding_fetch_leaves_room_for_the_next(cluster: Cluster) -> None:
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    handle = owner.embedding.publish("a", embedding(100))
    for num_turns in range(20):
        task = asyncio.create_task(fetcher.embedding.fetch(handle))
        for _ in range(num_turns % 5):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert torch.equal(await fetcher.embedding.fetch(handle), embedding(100))


async def test_the_age_of_the_oldest_lease_is_told_for_each_kind(cluster: Cluster) -> None:
    owner = cluster.add("owner")
    handle, shown = publish(owner, [1]), owner.embedding.publish("a", embedding(3))
    cluster.clock.now_s += 7
    publish(owner, [2])
    assert (owner.kv.oldest_lease_s, owner.embedding.oldest_lease_s) == (7, 7)
    owner.kv.release(handle.handle_id)
    owner.embedding.release(shown.handle_id)
    assert (owner.kv.oldest_lease_s, owner.embedding.oldest_lease_s) == (0, 0)


# -- A connector that can only be pulled from --------------------------------------------------------------------------


async def test_a_connector_that_cannot_push_says_so() -> None:
    replica = Cluster("by_reference").add("replica")
    assert not replica.kv.supports_push
    with pytest.raises(TransferError, match="cannot be pushed over object_store"):
        replica.kv.accept([1], 0)
    await replica.kv.meet(replica.kv.introduction())
    replica.kv.close_target("none")
    assert replica.kv.num_targets == 0


# -- By reference only: the owner's answer may be late -----------------------------------------------------------------


class LatePeers(InProcessPeers):
    """Hands the answer over only when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def read(self, owner: str, handle_id: str, first: int, count: int) -> torch.Tensor:
        values = await super().read(owner, handle_id, first, count)
        self.asked.set()
        await self.may_answer.wait()
        return values


async def test_an_answer_that_comes_late_is_still_the_old_data() -> None:
    cluster = Cluster("by_reference", peers=LatePeers())
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    peers = cluster.peers
    assert isinstance(peers, LatePeers)
    expected = owner.blocks[[2, 4]].clone()
    handle = publish(owner, [2, 4], lambda: owner.blocks.zero_())
    fetching = asyncio.create_task(fetcher.kv.fetch(handle, [0, 1]))
    await peers.asked.wait()
    owner.kv.release(handle.handle_id)
    assert not owner.blocks.any()
    peers.may_answer.set()
    await fetching
    assert torch.equal(fetcher.blocks[[0, 1]], expected)


async def test_an_answer_to_a_cancelled_fetch_is_not_written() -> None:
    cluster = Cluster("by_reference", peers=LatePeers())
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    peers = cluster.peers
    assert isinstance(peers, LatePeers)
    fetching = asyncio.create_task(fetcher.kv.fetch(publish(owner, [2]), [0]))
    await peers.asked.wait()
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    fetcher.blocks.zero_()
    peers.may_answer.set()
    await asyncio.sleep(0)
    assert not fetcher.blocks.any()


class WrongPeers(InProcessPeers):
    """Answers with something of another shape."""

    async def read(self, owner: str, handle_id: str, first: int, count: int) -> torch.Tensor:
        return (await super().read(owner, handle_id, first, count))[..., :1]


async def test_an_answer_of_another_shape_is_refused() -> None:
    cluster = Cluster("by_reference", peers=WrongPeers())
    owner, fetcher = cluster.add("owner"), cluster.add("fetcher")
    before = fetcher.blocks.clone()
    with pytest.raises(IncompatiblePeerError, match="the same version"):
        await fetcher.kv.fetch(publish(owner, [2]), [0])
    with pytest.raises(IncompatiblePeerError, match="the same version"):
        await fetcher.embedding.fetch(owner.embedding.publish("a", embedding(3)))
    assert torch.equal(fetcher.blocks, before)


def test_releasing_during_a_read_frees_when_the_read_ends() -> None:
    """The release comes from inside the copy, through a tensor subclass: no thread has to be raced."""
    cluster = Cluster("by_reference")
    owner = cluster.add("owner")
    on_free = Frees()
    counts_during_copy: list[int] = []

    class Watched(torch.Tensor):
        def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            owner.kv.release(handle.handle_id)
            counts_during_copy.append(on_free.count)
            return owner.blocks.index_select(dim, index)

    watched = replace(owner.kv_cache, blocks=owner.blocks.as_subclass(Watched))
    owner = replace_kv(owner, ByReferenceKVConnector("owner", watched, cluster.peers, LEASE_S, cluster.clock))
    handle = publish(owner, [1], on_free)
    assert torch.equal(owner.kv.read(handle.handle_id, 0, 1)[0], owner.blocks[1])
    assert counts_during_copy == [0]
    assert on_free.count == 1


def replace_kv(replica: Replica, kv: KVConnector) -> Replica:
    return Replica(replica.name, replica.kv_cache, Connectors(kv, replica.connectors.embedding))


# -- Choosing ----------------------------------------------------------------------------------------------------------


def test_an_encode_replica_has_no_kv_connector() -> None:
    connectors = build_connectors(
        "by_reference",
        owner="encoder",
        kv_cache=None,
        embedding_slab_bytes=0,
        embedding_layout="x",
        embedding_width=WIDTH,
        embedding_dtype="float32",
        lease_s=LEASE_S,
        peers=InProcessPeers(),
    )
    assert connectors.kv is None
    assert [kind for kind, _ in connectors.items()] == ["embedding"]
    connectors.close()


def test_the_object_store_means_by_reference() -> None:
    assert resolve_backend("object_store") == "by_reference"
    with pytest.raises(ConfigError, match=r"args\.transfer\.backend"):
        resolve_backend("pigeon")


def test_without_nixl_auto_falls_back_and_asking_for_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    assert resolve_backend("auto") == "by_reference"
    with pytest.raises(ConfigError, match=r"ray-epd\[nixl\]") as caught:
        resolve_backend("nixl")
    assert caught.value.path == "args.transfer.backend"
