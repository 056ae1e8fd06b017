"""Caches: a wrong hit gives a user somebody else's image, a wrong count loses memory until nothing fits, and
memory in small pages is slow to transfer."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epd.cache.block_pool import BlockPool
from epd.cache.embedding_cache import EmbeddingCache, HeldEmbeddings
from epd.cache.huge_pages import allocate_host
from epd.cache.kv_cache import allocate_kv_cache
from epd.cache.prefix_cache import PrefixCache, extend_block_keys
from epd.types import Embedding, KVSpec, MediaItem, Modality, PlaceholderRange


def keys_of(tokens, items=(), block_size=4):
    keys: list[bytes] = []
    extend_block_keys(keys, tokens, len(tokens), block_size, items)
    return keys


def item(mm_hash: str, offset: int = 2, num_tokens: int = 5) -> MediaItem:
    return MediaItem(0, Modality.IMAGE, mm_hash, PlaceholderRange(offset, num_tokens), (1, 2, 10))


def test_the_least_recently_freed_block_is_reused_first_and_its_owner_is_told():
    reused: list[int] = []
    pool = BlockPool(4, reused.append)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.release(second)
    pool.release(first)
    reused.clear()
    assert pool.allocate(4) == [*reversed(second), *reversed(first)]
    assert reused == [*reversed(second), *reversed(first)]


def test_a_shared_block_is_free_after_its_last_holder():
    pool = BlockPool(2)
    block = pool.allocate(1)
    pool.acquire(block)
    pool.release(block)
    assert pool.num_free == 1
    pool.release(block)
    assert pool.num_free == 2
    pool.check_integrity([])


def test_releasing_too_often_is_caught():
    pool = BlockPool(1)
    block = pool.allocate(1)
    pool.release(block)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(block)


def test_keys_chain_over_everything_before_a_block():
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 8]) != keys_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert keys_of([1, 2, 3, 4, 5])[0] == keys_of([1, 2, 3, 4, 9, 9, 9, 9])[0]
    assert keys_of([9, 2, 3, 4, 5, 6, 7, 8])[1] != keys_of([1, 2, 3, 4, 5, 6, 7, 8])[1]


def test_keys_cover_the_media_from_its_first_block_on():
    tokens = [1, 2, *[0] * 5, 3, 4, 5, 6, 7]
    red, blue = keys_of(tokens, [item("red")]), keys_of(tokens, [item("blue")])
    assert all(a != b for a, b in zip(red, blue, strict=True))
    late_red, late_blue = keys_of(tokens, [item("red", 6, 2)]), keys_of(tokens, [item("blue", 6, 2)])
    assert late_red[0] == late_blue[0]
    assert late_red[1] != late_blue[1]


def test_an_item_at_another_offset_has_other_keys():
    tokens = [0] * 8
    assert keys_of(tokens, [item("red", 0, 6)]) != keys_of(tokens, [item("red", 1, 6)])


def test_a_prefix_is_matched_up_to_the_first_gap():
    cache = PrefixCache()
    keys = keys_of(list(range(16)))
    for block_id, key in enumerate(keys):
        cache.insert(key, block_id)
    cache.forget(2)
    assert cache.match(keys) == [0, 1]
    cache.insert(keys[0], 9)
    assert cache.match(keys[:1]) == [0]


def embedding(num_rows: int) -> Embedding:
    return Embedding(torch.zeros(num_rows, 4))


def test_unreferenced_embeddings_leave_oldest_first():
    cache = EmbeddingCache(max_bytes=3 * 16)
    for name in ("a", "b", "c"):
        cache.put(name, embedding(1))
        cache.release(name)
    assert cache.acquire("a") is not None
    cache.put("d", embedding(1))
    assert "b" not in cache
    assert "a" in cache
    cache.check_integrity()


def test_an_embedding_larger_than_the_cache_lives_as_long_as_it_is_used():
    cache = EmbeddingCache(max_bytes=16)
    cache.put("big", embedding(50))
    cache.check_integrity()
    assert cache.acquire("big") is not None
    cache.release("big")
    cache.release("big")
    assert "big" not in cache
    assert cache.num_bytes == 0


def test_leaving_the_context_gives_every_reference_back():
    cache = EmbeddingCache(max_bytes=1000)
    with HeldEmbeddings(cache) as held:
        held.add(item("x"), cache.put("x", embedding(2)))
        assert cache.num_referenced == 1
    assert cache.num_referenced == 0


@given(st.lists(st.tuples(st.sampled_from(["put", "release"]), st.integers(0, 5), st.integers(1, 6)), max_size=60))
def test_the_embedding_cache_keeps_its_books(operations):
    cache = EmbeddingCache(max_bytes=10 * 16)
    references: list[str] = []
    for operation, key, rows in operations:
        if operation == "put":
            cache.put(str(key), embedding(rows))
            references.append(str(key))
        elif str(key) in references:
            references.remove(str(key))
            cache.release(str(key))
        cache.check_integrity()
        assert all(name in cache for name in references)


@pytest.mark.parametrize("num_blocks", [3, 1000])
def test_a_kv_cache_starts_as_zeros_and_outlives_its_maker(num_blocks):
    cache = allocate_kv_cache(
        KVSpec(2, 1, 64, "bfloat16", 2), block_size=16, num_blocks=num_blocks, model_fingerprint="m"
    )
    blocks = cache.blocks
    assert blocks.shape == (num_blocks, 2, 2, 16, 1, 64)
    assert cache.pages.shape[0] == num_blocks + 1
    assert cache.pages.data_ptr() == blocks.data_ptr()
    assert not cache.pages.any()
    del cache
    gc.collect()
    blocks.fill_(3.0)
    assert (blocks == 3.0).all()


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages")
@pytest.mark.parametrize(("num_bytes", "is_advised"), [(64 << 20, True), (1 << 20, False)])
def test_the_kernel_is_asked_for_huge_pages_under_a_large_pool(num_bytes, is_advised):
    memory = allocate_host(num_bytes)
    assert ("hg" in flags_of_mapping(memory.data_ptr())) == is_advised


def flags_of_mapping(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that holds an address."""
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            start, end = (int(bound, 16) for bound in name.split("-"))
            holds = start <= address < end
        elif holds and name == "VmFlags:":
            return rest.split()
    raise AssertionError("no mapping holds the address")
