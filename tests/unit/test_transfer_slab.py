"""The slab under published embeddings, and the arithmetic that turns block ids into reads.

If these fail, two images of different users share memory, or a slab fragments until nothing can be published.
"""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epd.transfer.moves import Move, Run, batches, block_runs, plan_moves, skip_bytes
from epd.transfer.slab import EmbeddingSlab, SlabAllocator

CAPACITY_BYTES = 4096

steps = st.lists(st.one_of(st.integers(1, 1500), st.floats(0, 1, exclude_max=True)), max_size=60)


@given(steps)
def test_ranges_never_overlap_and_everything_freed_is_one_run_again(actions: list[int | float]) -> None:
    """An int allocates so many bytes; a float frees one of the live ranges."""
    allocator = SlabAllocator(CAPACITY_BYTES)
    live: dict[int, int] = {}
    for action in actions:
        if isinstance(action, int):
            offset = allocator.allocate(action)
            if offset is None:
                assert all(end - start < action for start, end in allocator.free_runs)
            else:
                assert 0 <= offset <= CAPACITY_BYTES - action
                assert all(offset + action <= other or other + size <= offset for other, size in live.items())
                live[offset] = action
        elif live:
            offset = sorted(live)[int(action * len(live))]
            del live[offset]
            allocator.free(offset)
        free_bytes = sum(end - start for start, end in allocator.free_runs)
        assert free_bytes + allocator.used_bytes == CAPACITY_BYTES
        ends = [end for _, end in allocator.free_runs]
        starts = [start for start, _ in allocator.free_runs]
        assert all(end < start for end, start in zip(ends, starts[1:], strict=False)), "free runs coalesce"
    for offset in live:
        allocator.free(offset)
    assert allocator.free_runs == [(0, CAPACITY_BYTES)]
    assert allocator.used_bytes == 0


def test_freeing_what_is_not_allocated_is_a_bug_that_shows() -> None:
    allocator = SlabAllocator(CAPACITY_BYTES)
    offset = allocator.allocate(100)
    assert offset == 0
    allocator.free(0)
    with pytest.raises(KeyError):
        allocator.free(0)


def test_a_slab_of_no_bytes_has_room_for_nothing() -> None:
    assert SlabAllocator(0).allocate(1) is None
    assert SlabAllocator(63).allocate(1) is None


def test_publishing_the_same_content_from_many_threads_stores_it_once_and_whole() -> None:
    slab = EmbeddingSlab(1 << 20, 16, torch.float32)
    values = torch.arange(16.0 * 64).view(64, 16)
    whole: list[bool] = []

    def publish() -> None:
        for _ in range(50):
            stored = slab.add("same", values)
            whole.append(torch.equal(stored.values, values))
            slab.drop(stored)

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(whole) == 200
    assert all(whole)
    assert slab.used_bytes == 0


block_lists = st.lists(st.integers(0, 63), min_size=1, max_size=40, unique=True)


@given(block_lists, st.randoms(use_true_random=False), st.integers(0, 40), st.integers(1, 64))
def test_planned_reads_move_every_wanted_byte_to_its_place(
    source: list[int], random: object, first: int, batch_bytes: int
) -> None:
    block_bytes = 8
    first = min(first, len(source) - 1)
    into = list(range(64))
    random.shuffle(into)  # type: ignore[attr-defined]
    into = into[: len(source) - first]
    remote = skip_bytes(block_runs(source, 10_000, block_bytes), first * block_bytes)
    moves = plan_moves(remote, block_runs(into, 50_000, block_bytes))
    seen: dict[int, int] = {}
    for batch in batches(moves, batch_bytes):
        assert 0 < batch[:, 2].sum() <= batch_bytes
        assert (batch[:, 2] > 0).all()
        for move in (Move(*row) for row in batch.tolist()):
            for i in range(move.num_bytes):
                assert move.local_address + i not in seen
                seen[move.local_address + i] = move.remote_address + i
    assert seen == {
        50_000 + to * block_bytes + i: 10_000 + from_ * block_bytes + i
        for from_, to in zip(source[first:], into, strict=True)
        for i in range(block_bytes)
    }


def test_adjacent_blocks_become_one_read() -> None:
    assert block_runs([4, 5, 6, 2], 100, 10).tolist() == [list(Run(140, 30)), list(Run(120, 10))]
    moves = plan_moves(block_runs([4, 5, 6], 100, 10), block_runs([1, 2, 7], 500, 10))
    assert moves.tolist() == [list(Move(140, 510, 20)), list(Move(160, 570, 10))]
    assert [batch.tolist() for batch in batches(moves, 100)] == [moves.tolist()]


def test_no_blocks_are_no_moves_and_a_side_that_is_too_short_is_an_error() -> None:
    none = block_runs([], 100, 10)
    assert none.shape == (0, 2)
    assert skip_bytes(none, 0).shape == (0, 2)
    assert plan_moves(block_runs([1], 100, 10), none).shape == (0, 3)
    assert not list(batches(plan_moves(none, none), 100))
    with pytest.raises(ValueError, match="shorter than 20 bytes"):
        plan_moves(block_runs([1], 100, 10), block_runs([1, 2], 100, 10))
