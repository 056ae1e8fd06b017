"""Host memory that the kernel is asked to back with huge pages. Knows nothing of what is kept there.

A pool of many megabytes in pages of 4 KiB costs twice: whoever jumps about in it misses the TLB, and the kernel, which
copies it to or from another process, looks up and copies page by page. Backed by pages of 2 MiB it was copied between
processes 1.4 times as fast (``examples/benchmarks/transfer.py``).
"""

from __future__ import annotations

import contextlib
import mmap

import torch

__all__ = ["allocate_host"]

_HUGE_PAGE_BYTES = 2 * 2**20
_MIN_BYTES = 2 * _HUGE_PAGE_BYTES
"""Smaller memory gains nothing: there may not be one huge page in it."""


def allocate_host(num_bytes: int) -> torch.Tensor:
    """Return zeroed uint8 ``[num_bytes]`` on the CPU, every page of it in place.

    A page fault in the middle of a transfer would stall it: for the whole pool, hundreds of milliseconds.
    """
    memory = torch.empty(num_bytes, dtype=torch.uint8) if num_bytes < _MIN_BYTES else _map(num_bytes)
    return memory.zero_()


def _map(num_bytes: int) -> torch.Tensor:
    # Private, although nobody shares it with anyone: what is mapped as shared is a file of the kernel's, where huge
    # pages are another setting, and slower (measured).
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Not every kernel has them.
    with contextlib.suppress(OSError, AttributeError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)  # Keeps the mapping as long as it lives.
