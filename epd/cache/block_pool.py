"""Who holds which KV block: reference counts, and the order in which unreferenced blocks are reused.

Knows nothing of tensors, requests or hashes. A block that nothing references keeps its contents until it is allocated
again, so the prefix cache can revive it; the pool says when it is about to be reused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Blocks ``0 .. num_blocks - 1`` with reference counts.

    Unreferenced blocks form a queue: the least recently freed is reused first, so the queue is the prefix cache's LRU.
    ``on_reuse`` is called with a block id when an unreferenced block is handed out and its old contents are lost.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[int], None] = lambda block_id: None) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._on_reuse = on_reuse

    @property
    def num_free(self) -> int:
        """Blocks that nothing references, with or without reusable contents."""
        return len(self._free)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks with one reference each. The caller has asked ``can_allocate``."""
        assert self.can_allocate(count), f"allocate({count}) with {self.num_free} free blocks"
        block_ids = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            self._on_reuse(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block; an unreferenced one leaves the reuse queue with its contents intact."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block.

        Freed from the back, so that the tail of a sequence is reused before its head, which more prompts share.
        """
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, f"block {block_id} released more often than acquired"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that the counts equal what ``holders`` (every live block list) reference."""
        counts = [0] * self.num_blocks
        for block_ids in holders:
            for block_id in block_ids:
                counts[block_id] += 1
        assert counts == self._ref_counts, "block reference counts differ from what sequences, claims and holds use"
        free = {block_id for block_id, count in enumerate(counts) if count == 0}
        assert free == set(self._free), "free list differs from the unreferenced blocks"
