"""Host memory that copies to and from a device pass through, so that they neither block nor allocate.

``Uploads`` carries all arrays of a step to the device in one copy; ``Downloads`` brings results back. The memory is
pinned on CUDA, without which such a copy waits for the device; elsewhere it is ordinary, and copies are done when they
return. Knows nothing of what the arrays mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]

_DTYPES = {"int64": torch.int64, "int32": torch.int32}
_ALIGNMENT_BYTES = 16
_SMALLEST_BYTES = 4096


class Fence:
    """A point in the device's work that the host can wait for."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._event = torch.cuda.Event() if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def set(self) -> None:
        """Stand after all that this thread has given the device so far."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class HostBuffer:
    """Bytes of host memory that grow to the largest size asked for, and are used again and again."""

    def __init__(self, device: str) -> None:
        self._is_pinned = torch.device(device).type == "cuda"
        self.memory = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 ``[num_bytes]``; what an earlier call returned is overwritten, or let go."""
        if num_bytes > self.memory.nbytes:
            capacity = max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
            self.memory = torch.empty(capacity, dtype=torch.uint8, pin_memory=self._is_pinned)
        return self.memory[:num_bytes]


class Uploads:
    """Arrays to the device. Two buffers take turns: one is filled while the other may still be on its way."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._slots = [(HostBuffer(device), Fence(device)) for _ in range(2)]
        self._turn = 0

    def send(self, arrays: Mapping[str, Array], into: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Copy arrays to the device, or into uint8 memory there that a graph reads; return them as tensors by name.

        Does not block, unless the copy before last is still running. The caller may change the arrays at once.
        """
        buffer, fence = self._slots[self._turn]
        self._turn = 1 - self._turn
        fence.wait()
        packed = buffer.take(packed_bytes(arrays))
        host = packed.numpy()
        for offset, _, array in _placed(arrays):
            host[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        target = torch.empty(packed.nbytes, dtype=torch.uint8, device=self._device) if into is None else into
        target.copy_(packed, non_blocking=True)
        fence.set()
        return unpack(target, arrays)


class Downloads:
    """Results to the host, through one buffer a kind: a result holds until the next of its kind is fetched."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._buffers: dict[str, HostBuffer] = {}
        self._fence = Fence(device)

    def fetch(self, kind: str, values: torch.Tensor) -> torch.Tensor:
        """Start copying; return the host tensor, to be read after ``wait``."""
        if kind not in self._buffers:
            self._buffers[kind] = HostBuffer(self._device)
        host = self._buffers[kind].take(values.nbytes).view(values.dtype).view(values.shape)
        return host.copy_(values, non_blocking=True)

    def mark(self) -> None:
        """Let ``wait`` wait for all that was given to the device so far."""
        self._fence.set()

    def wait(self) -> None:
        self._fence.wait()


def packed_bytes(arrays: Mapping[str, Array]) -> int:
    """Return the size of arrays laid out one after another, aligned."""
    return max((offset + _aligned(array.nbytes) for offset, _, array in _placed(arrays)), default=0)


def unpack(memory: torch.Tensor, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Return views of uint8 ``memory`` with the types and shapes of the arrays that were packed into it."""
    views = {}
    for offset, name, array in _placed(arrays):
        flat = memory[offset : offset + array.nbytes].view(_DTYPES[array.dtype.name])
        views[name] = flat.view(array.shape)
    return views


def _placed(arrays: Mapping[str, Array]) -> Iterator[tuple[int, str, Array]]:
    offset = 0
    for name, array in arrays.items():
        contiguous = np.ascontiguousarray(array)
        yield offset, name, contiguous
        offset += _aligned(contiguous.nbytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
