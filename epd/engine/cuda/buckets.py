"""Batch sizes that decode steps are padded to, so that few shapes are captured. Pure numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_FINE_SIZES = (1, 2, 4, 8)
_COARSE_STEP = 16


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return batch sizes, ascending, up to ``max_num_seqs``: 1, 2, 4, 8, then multiples of 16, and the maximum.

    Powers of two alone would nearly double the largest batches.
    """
    sizes = [*_FINE_SIZES, *range(_COARSE_STEP, max_num_seqs, _COARSE_STEP)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def bucket_for(num_seqs: int, buckets: Sequence[int]) -> int | None:
    """Return the smallest bucket that holds ``num_seqs`` sequences; ``None`` if none does."""
    index = bisect_left(buckets, num_seqs)
    return buckets[index] if index < len(buckets) else None
