"""What a replica counts. Plain numbers that only grow, plus gauges read at the moment of the snapshot.

Whoever exports metrics turns a snapshot into its own format; nothing here knows Prometheus.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from epd.types import Stage


@dataclass(slots=True)
class Histogram:
    """Cumulative-bucket histogram of seconds. ``counts[i]`` counts observations at most ``bounds_s[i]``, not cumulated;
    the last entry counts the rest."""

    bounds_s: tuple[float, ...] = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
    counts: list[int] = field(default_factory=list)
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds_s) + 1)

    def observe(self, value_s: float) -> None:
        index = next((i for i, bound_s in enumerate(self.bounds_s) if value_s <= bound_s), len(self.bounds_s))
        self.counts[index] += 1
        self.sum_s += value_s

    @property
    def cumulative(self) -> Sequence[int]:
        total, result = 0, []
        for count in self.counts:
            total += count
            result.append(total)
        return result


@dataclass(slots=True)
class WorkerStats:
    """A snapshot of one replica. Keys of the dictionaries are the label values of the metric of the same name."""

    stage_requests: dict[str, int] = field(default_factory=dict)
    """By stage: requests that ran it here, fused or alone."""
    stage_seconds: dict[str, Histogram] = field(default_factory=dict)
    encode_items: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    transfer_bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    """By (kind, backend), counted at the fetching side. Kinds: ``kv``, ``embedding``."""
    transfer_failures: dict[str, int] = field(default_factory=dict)
    prefix_cache_tokens: dict[str, int] = field(default_factory=lambda: {"hit": 0, "miss": 0})
    embedding_cache_items: dict[str, int] = field(default_factory=lambda: {"hit": 0, "miss": 0})
    preemptions: int = 0
    # Gauges
    queue_requests: dict[str, int] = field(default_factory=dict)
    running_requests: dict[str, int] = field(default_factory=dict)
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    handles_live: dict[str, int] = field(default_factory=dict)
    handles_live_bytes: dict[str, int] = field(default_factory=dict)
    handles_oldest_s: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Counters:
    """What a worker counts by itself, beside the counters of its parts."""

    stage_requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Stage, 0))
    stage_seconds: dict[str, Histogram] = field(default_factory=lambda: {stage: Histogram() for stage in Stage})
    transfer_bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    transfer_failures: dict[str, int] = field(default_factory=lambda: {"kv": 0, "embedding": 0})
    running: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Stage, 0))

    @contextlib.contextmanager
    def stage(self, *stages: Stage) -> Iterator[None]:
        """Count a request in the stages that it runs here, while it runs them."""
        for stage in stages:
            self.stage_requests[stage] += 1
            self.running[stage] += 1
        try:
            yield
        finally:
            for stage in stages:
                self.running[stage] -= 1

    def transferred(self, kind: str, backend: str, num_bytes: int) -> None:
        self.transfer_bytes[kind, backend] = self.transfer_bytes.get((kind, backend), 0) + num_bytes
