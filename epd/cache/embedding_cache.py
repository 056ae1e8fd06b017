"""Embeddings by content: reference-counted, least recently used out first, bounded in bytes.

Knows nothing of encoders, transfers or requests. Not thread-safe: one thread owns it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from epd.types import Embedding, MediaItem


@dataclass(slots=True)
class _Entry:
    embedding: Embedding
    nbytes: int
    ref_count: int = 0


class EmbeddingCache:
    """``mm_hash`` -> embedding.

    Referenced entries are never evicted; unreferenced ones go, oldest first, when the total exceeds ``max_bytes``. An
    entry that cannot fit beside the referenced ones is still held for as long as it is referenced, so that a request
    always makes progress, and leaves with its last reference.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._entries

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_referenced(self) -> int:
        return sum(1 for entry in self._entries.values() if entry.ref_count)

    def acquire(self, mm_hash: str) -> Embedding | None:
        """Return the embedding with one more reference, or ``None`` if it is not here."""
        entry = self._entries.get(mm_hash)
        if entry is None:
            return None
        entry.ref_count += 1
        self._entries.move_to_end(mm_hash)
        return entry.embedding

    def put(self, mm_hash: str, embedding: Embedding) -> Embedding:
        """Add an embedding with one reference and return the cached one (an equal one may have been here first)."""
        if (present := self.acquire(mm_hash)) is not None:
            return present
        nbytes = embedding.values.numel() * embedding.values.element_size()
        self._entries[mm_hash] = _Entry(embedding, nbytes, ref_count=1)
        self._num_bytes += nbytes
        self._evict()
        return embedding

    def release(self, mm_hash: str) -> None:
        entry = self._entries[mm_hash]
        assert entry.ref_count > 0, f"embedding {mm_hash} released more often than acquired"
        entry.ref_count -= 1
        self._evict()

    def _evict(self) -> None:
        if self._num_bytes <= self.max_bytes:
            return
        for mm_hash in [key for key, entry in self._entries.items() if entry.ref_count == 0]:
            self._num_bytes -= self._entries.pop(mm_hash).nbytes
            if self._num_bytes <= self.max_bytes:
                return

    def check_integrity(self) -> None:
        assert self._num_bytes == sum(entry.nbytes for entry in self._entries.values())
        if self._num_bytes > self.max_bytes:
            assert all(entry.ref_count for entry in self._entries.values()), "unreferenced embeddings over the limit"


class HeldEmbeddings:
    """The references that one request holds in a cache, by item index; leaving the context gives them back."""

    def __init__(self, cache: EmbeddingCache) -> None:
        self._cache = cache
        self._held: dict[int, tuple[str, Embedding]] = {}

    def __enter__(self) -> HeldEmbeddings:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for mm_hash, _ in self._held.values():
            self._cache.release(mm_hash)
        self._held.clear()

    def add(self, item: MediaItem, embedding: Embedding) -> None:
        """Take over one reference."""
        self._held[item.index] = (item.mm_hash, embedding)

    def __getitem__(self, index: int) -> Embedding:
        return self._held[index][1]
