"""The ``epd`` object of a reply, built from what the stages report. Knows nothing of HTTP frameworks."""

from __future__ import annotations

from typing import Any

from epd.types import Placement, StageReport

TIMINGS = (
    "fetch",
    "preprocess",
    "encode_queue",
    "encode",
    "embedding_transfer",
    "prefill_queue",
    "prefill",
    "kv_transfer",
    "ttft",
    "decode",
)


def trace_object(placement: Placement, report: StageReport, *, ttft_s: float, num_attempts: int) -> dict[str, Any]:
    """Return the trace of a finished request: every timing is there, 0 for what did not happen.

    Times of a stage add up over items and legs, so with several encoders ``encode`` may exceed what passed on the wall.
    """
    seconds = {**report.timings_s, "ttft": ttft_s}
    return {
        "mode": placement.mode.value,
        "reason": placement.reason,
        "placement": {
            "encode": list(placement.encode),
            "prefill": placement.prefill,
            "decode": placement.decode,
        },
        "attempts": num_attempts,
        "timings_ms": {name: round(seconds.get(name, 0.0) * 1000, 3) for name in TIMINGS},
        "bytes": {kind: report.transferred_bytes.get(kind, 0) for kind in ("embedding", "kv")},
        "cached": {kind: report.cached.get(kind, 0) for kind in ("prefix_tokens", "embedding_items")},
    }
