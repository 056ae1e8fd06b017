"""The metrics page: the ingress's own counters, and the counters of every replica rendered beside them.

Owns names, labels and the Prometheus format. Knows nothing of how snapshots were obtained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from epd.stages.stats import Histogram as StageHistogram
from epd.stages.stats import WorkerStats

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class IngressMetrics:
    """What one ingress replica counts. ``replica`` labels each sample, since several ingresses answer together."""

    def __init__(self, replica_id: str) -> None:
        self.registry = CollectorRegistry()
        self._replica = replica_id
        labels = ("replica",)
        self._requests = Counter(
            "epd_requests",
            "Requests answered, by the mode that ran.",
            (*labels, "mode", "status"),
            registry=self.registry,
        )
        self._running = Gauge("epd_ingress_running_requests", "Requests in progress.", labels, registry=self.registry)
        self._ttft = self._histogram("epd_ttft_seconds", "Receipt to the first token sent.", TTFT_BUCKETS_S)
        self._itl = self._histogram("epd_itl_seconds", "Gap between consecutive tokens, as they left.", ITL_BUCKETS_S)
        self._e2e = self._histogram("epd_e2e_seconds", "Receipt to the last token sent.", E2E_BUCKETS_S)
        self._rejections = Counter(
            "epd_rejections", "Requests not admitted.", (*labels, "reason"), registry=self.registry
        )
        self._resumed = Counter(
            "epd_resumed_requests", "Requests placed again after a failure.", labels, registry=self.registry
        )
        # Present from the start, so that a rate over them never begins with a gap.
        self._resumed.labels(replica_id)
        self._running.labels(replica_id)

    def _histogram(self, name: str, description: str, buckets_s: Sequence[float]) -> Histogram:
        return Histogram(name, description, ("replica", "mode"), buckets=buckets_s, registry=self.registry)

    def request_started(self) -> RequestCount:
        """Count a request as running until the returned object is told how it ended."""
        self._running.labels(self._replica).inc()
        return RequestCount(self)

    def request_ended(self, mode: str, status: int) -> None:
        self._running.labels(self._replica).dec()
        self._requests.labels(self._replica, mode, str(status)).inc()

    def rejected(self, reason: str) -> None:
        self._rejections.labels(self._replica, reason).inc()

    def resumed(self) -> None:
        self._resumed.labels(self._replica).inc()

    def first_token(self, mode: str, ttft_s: float) -> None:
        self._ttft.labels(self._replica, mode).observe(ttft_s)

    def next_tokens(self, mode: str, gap_s: float, num_tokens: int) -> None:
        """Count the gap before an item of ``num_tokens`` tokens of one choice; those after its first came with none."""
        itl = self._itl.labels(self._replica, mode)
        itl.observe(gap_s)
        for _ in range(num_tokens - 1):
            itl.observe(0.0)

    def finished(self, mode: str, e2e_s: float) -> None:
        self._e2e.labels(self._replica, mode).observe(e2e_s)

    def families(self) -> list[Metric]:
        """Return a snapshot, picklable, for another ingress's page; without the times at which series began."""
        families = list(self.registry.collect())
        for family in families:
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        return families


class RequestCount:
    """One running request in the metrics; only the first ``end`` counts, so every exit path may call it."""

    def __init__(self, metrics: IngressMetrics) -> None:
        self._metrics = metrics
        self._has_ended = False

    def end(self, mode: str, status: int) -> None:
        """Say how it went; ``mode`` is ``none`` if it was never placed."""
        if not self._has_ended:
            self._has_ended = True
            self._metrics.request_ended(mode, status)


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """The counters of one pool replica."""

    pool: str
    replica_id: str
    stats: WorkerStats


def render(ingresses: Iterable[Sequence[Metric]], replicas: Iterable[ReplicaSnapshot]) -> bytes:
    """Return the page in Prometheus text format; families of the same name are merged."""
    merged: dict[str, Metric] = {}
    for family in [*(family for families in ingresses for family in families), *_replica_families(replicas)]:
        if family.name in merged:
            merged[family.name].samples.extend(family.samples)
        else:
            merged[family.name] = family

    class Page(Collector):
        def collect(self) -> Iterator[Metric]:
            return iter(merged.values())

    page = CollectorRegistry()
    page.register(Page())
    text: bytes = generate_latest(page)
    return text


def _replica_families(replicas: Iterable[ReplicaSnapshot]) -> list[Metric]:
    families = _Families()
    for replica in replicas:
        families.add(replica)
    return families.all


class _Families:
    """One family per metric of a pool replica."""

    def __init__(self) -> None:
        base = ("replica", "pool")
        counter, gauge = CounterMetricFamily, GaugeMetricFamily
        self.stage_requests = counter("epd_stage_requests", "Requests that ran a stage.", labels=(*base, "stage"))
        self.stage_seconds = HistogramMetricFamily(
            "epd_stage_seconds", "Seconds that a stage took.", labels=(*base, "stage")
        )
        self.encode_items = counter("epd_encode_items", "Images and clips encoded.", labels=base)
        self.stage_tokens = counter("epd_stage_tokens", "Tokens computed by a stage.", labels=(*base, "stage"))
        self.queue = gauge("epd_queue_requests", "Requests that wait for a stage.", labels=(*base, "stage"))
        self.running = gauge("epd_running_requests", "Requests in a stage.", labels=(*base, "stage"))
        self.blocks_total = gauge("epd_kv_blocks_total", "KV blocks.", labels=base)
        self.blocks_free = gauge("epd_kv_blocks_free", "KV blocks that nothing references.", labels=base)
        self.handles = gauge("epd_handles_live", "Claims of others on memory here.", labels=(*base, "kind"))
        self.handle_bytes = gauge("epd_handles_live_bytes", "Bytes under those claims.", labels=(*base, "kind"))
        self.handle_age = gauge("epd_handles_oldest_seconds", "Age of the oldest such claim.", labels=(*base, "kind"))
        self.bytes = counter("epd_transfer_bytes", "Bytes fetched or pushed.", labels=(*base, "kind", "backend"))
        self.failures = counter("epd_transfer_failures", "Failed fetches and pushes.", labels=(*base, "kind"))
        self.prefix = counter("epd_prefix_cache_tokens", "Prompt tokens looked up.", labels=(*base, "result"))
        self.embeddings = counter("epd_embedding_cache_items", "Media items looked up.", labels=(*base, "result"))
        self.preemptions = counter("epd_preemptions", "Sequences preempted for want of blocks.", labels=base)

    @property
    def all(self) -> list[Metric]:
        return list(vars(self).values())

    def add(self, replica: ReplicaSnapshot) -> None:
        base, stats = (replica.replica_id, replica.pool), replica.stats
        per_key = (
            (self.stage_requests, stats.stage_requests),
            (self.stage_tokens, {"prefill": stats.prefill_tokens, "decode": stats.decode_tokens}),
            (self.queue, stats.queue_requests),
            (self.running, stats.running_requests),
            (self.handles, stats.handles_live),
            (self.handle_bytes, stats.handles_live_bytes),
            (self.handle_age, stats.handles_oldest_s),
            (self.failures, stats.transfer_failures),
            (self.prefix, stats.prefix_cache_tokens),
            (self.embeddings, stats.embedding_cache_items),
        )
        for family, values in per_key:
            for key, value in values.items():
                family.add_metric((*base, str(key)), value)
        for (kind, backend), num_bytes in stats.transfer_bytes.items():
            self.bytes.add_metric((*base, kind, backend), num_bytes)
        for stage, histogram in stats.stage_seconds.items():
            self.stage_seconds.add_metric((*base, str(stage)), _buckets(histogram), histogram.sum_s)
        self.encode_items.add_metric(base, stats.encode_items)
        self.blocks_total.add_metric(base, stats.kv_blocks_total)
        self.blocks_free.add_metric(base, stats.kv_blocks_free)
        self.preemptions.add_metric(base, stats.preemptions)


def _buckets(histogram: StageHistogram) -> list[tuple[str, float]]:
    bounds = [*(repr(bound_s) for bound_s in histogram.bounds_s), "+Inf"]
    return list(zip(bounds, map(float, histogram.cumulative), strict=True))
