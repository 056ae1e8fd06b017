"""One fixed piece of memory, carved into ranges of any size; and embeddings kept in it, each stored once.

Owns the ranges. Knows nothing of leases or transports, except that the memory never moves, so that a transport may
register it once.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass

import torch

from epd.errors import TransferError

__all__ = ["EmbeddingSlab", "SlabAllocator", "StoredEmbedding", "wait_for_device"]

_ALIGNMENT_BYTES = 64


class SlabAllocator:
    """First-fit allocator over ``[0, capacity_bytes)`` whose free runs coalesce. Not thread-safe."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes - capacity_bytes % _ALIGNMENT_BYTES
        self._starts: list[int] = []
        """Starts of the free runs, ascending, none touching the next."""
        self._ends: list[int] = []
        self._sizes: dict[int, int] = {}
        """Allocated ranges, by offset."""
        self.used_bytes = 0
        if self.capacity_bytes:
            self._starts, self._ends = [0], [self.capacity_bytes]

    @property
    def free_runs(self) -> list[tuple[int, int]]:
        """Free ranges as (start, end), ascending."""
        return list(zip(self._starts, self._ends, strict=True))

    def allocate(self, num_bytes: int) -> int | None:
        """Return the offset of a free range, or ``None`` if no free run is long enough."""
        size = max(1, -(-num_bytes // _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES
        for index, start in enumerate(self._starts):
            if self._ends[index] - start < size:
                continue
            self._starts[index] += size
            if self._starts[index] == self._ends[index]:
                del self._starts[index], self._ends[index]
            self._sizes[start] = size
            self.used_bytes += size
            return start
        return None

    def free(self, offset: int) -> None:
        """Give back a range by its offset. Raises ``KeyError`` if it is not allocated."""
        size = self._sizes.pop(offset)
        self.used_bytes -= size
        end = offset + size
        index = bisect_left(self._starts, offset)
        touches_previous = index > 0 and self._ends[index - 1] == offset
        touches_next = index < len(self._starts) and self._starts[index] == end
        if touches_previous and touches_next:
            self._ends[index - 1] = self._ends[index]
            del self._starts[index], self._ends[index]
        elif touches_previous:
            self._ends[index - 1] = end
        elif touches_next:
            self._starts[index] = offset
        else:
            self._starts.insert(index, offset)
            self._ends.insert(index, end)


@dataclass(slots=True)
class StoredEmbedding:
    """An embedding inside the slab, with the number of claims on it."""

    mm_hash: str
    values: torch.Tensor
    """``[num_tokens, width]``, a view of the slab."""
    offset_bytes: int
    num_claims: int = 0


class EmbeddingSlab:
    """Embeddings ``[num_tokens, width]`` in one tensor, the same content stored once. Thread-safe.

    The memory is taken from the system page by page, as it is first written.
    """

    def __init__(self, capacity_bytes: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
        self.width = width
        self.dtype = dtype
        self.memory = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        self._allocator = SlabAllocator(capacity_bytes)
        self._stored: dict[str, StoredEmbedding] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        """One writer at a time, so that whoever finds content stored also finds it complete."""

    @property
    def used_bytes(self) -> int:
        return self._allocator.used_bytes

    def add(self, mm_hash: str, values: torch.Tensor) -> StoredEmbedding:
        """Claim the embedding, copying it in unless it is here. Raises ``TransferError`` when there is no room."""
        if values.ndim != 2 or values.shape[1] != self.width or values.dtype != self.dtype:
            raise ValueError(
                f"expected an embedding [num_tokens, {self.width}] of {self.dtype}, "
                f"got {list(values.shape)} of {values.dtype}"
            )
        with self._writing:
            with self._lock:
                stored = self._stored.get(mm_hash)
                if stored is not None:
                    stored.num_claims += 1
                    return stored
                offset = self._allocator.allocate(values.nbytes)
            if offset is None:
                raise TransferError(
                    f"no room to publish an embedding of {values.nbytes} bytes: {self.used_bytes} of "
                    f"{self.memory.nbytes} bytes are held for requests that have not fetched theirs yet"
                )
            room = self.memory[offset : offset + values.nbytes].view(self.dtype).view(values.shape)
            room.copy_(values)
            wait_for_device(room)
            stored = StoredEmbedding(mm_hash, room, offset, num_claims=1)
            with self._lock:
                self._stored[mm_hash] = stored
            return stored

    def drop(self, stored: StoredEmbedding) -> None:
        """Give one claim up; the last one frees the room."""
        with self._lock:
            stored.num_claims -= 1
            if stored.num_claims == 0:
                del self._stored[stored.mm_hash]
                self._allocator.free(stored.offset_bytes)


def wait_for_device(tensor: torch.Tensor) -> None:
    """Wait until what this thread queued on the tensor's device is done: transports and other threads see memory, not
    streams."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
