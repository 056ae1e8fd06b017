"""The metrics page by name. If these fail, dashboards and alerts of the documented names show nothing."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from deployments.metrics import IngressMetrics, ReplicaSnapshot, render
from epd.stages.stats import Histogram, WorkerStats
from epd.types import Stage

LABELS = {
    "epd_requests_total": {"mode", "status"},
    "epd_stage_requests_total": {"stage", "pool"},
    "epd_encode_items_total": {"pool"},
    "epd_ttft_seconds_count": {"mode"},
    "epd_itl_seconds_count": {"mode"},
    "epd_e2e_seconds_count": {"mode"},
    "epd_stage_seconds_count": {"stage", "pool"},
    "epd_queue_requests": {"stage", "pool"},
    "epd_running_requests": {"stage", "pool"},
    "epd_kv_blocks_total": {"pool"},
    "epd_kv_blocks_free": {"pool"},
    "epd_handles_live": {"kind", "pool"},
    "epd_handles_oldest_seconds": {"kind", "pool"},
    "epd_transfer_bytes_total": {"kind", "backend", "pool"},
    "epd_transfer_failures_total": {"kind", "pool"},
    "epd_prefix_cache_tokens_total": {"result", "pool"},
    "epd_embedding_cache_items_total": {"result", "pool"},
    "epd_preemptions_total": {"pool"},
    "epd_rejections_total": {"reason"},
    "epd_resumed_requests_total": set(),
}


def test_every_documented_metric_is_there_with_its_labels_and_a_replica():
    ingress = IngressMetrics("ingress#1")
    ingress.request_started().end("epd", 200)
    ingress.first_token("epd", 0.1)
    ingress.next_tokens("epd", 0.01, 2)
    ingress.finished("epd", 0.3)
    ingress.rejected("ttft")
    ingress.resumed()
    stats = WorkerStats(
        stage_requests={Stage.PREFILL: 1},
        stage_seconds={Stage.PREFILL: Histogram()},
        transfer_bytes={("kv", "nixl"): 1},
        transfer_failures={"kv": 1},
        queue_requests={Stage.DECODE: 1},
        running_requests={Stage.DECODE: 1},
        handles_live={"kv": 1},
        handles_live_bytes={"kv": 1},
        handles_oldest_s={"kv": 2.5},
    )
    page = render([ingress.families()], [ReplicaSnapshot("all", "all#1", stats)]).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            assert sample.labels.get("replica") in ("ingress#1", "all#1"), sample
            found.setdefault(sample.name, set(sample.labels) - {"replica"})
    assert {name: found.get(name) for name in LABELS} == LABELS
