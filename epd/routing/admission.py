"""Whether to take a request in at all, decided once, at arrival, before anything was spent on it.

Owns the rule that turns a prediction and queue lengths into a rejection. Knows nothing of how either was obtained.

Two reasons to reject: the queue holds as many requests as it may (always in force), and the SLO is predicted to be
missed (off by configuration). The second never applies to an idle path, where waiting cannot help and the prediction
may be wrong, nor to a prediction from uncalibrated priors, which may be off by any factor.
"""

from __future__ import annotations

from dataclasses import dataclass

from epd.errors import AdmissionRejectedError
from epd.routing.predict import Prediction
from epd.types import SLO

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """``max_queued_requests`` holds always; ``rejects_slo_misses`` turns rejection by prediction on."""

    max_queued_requests: int
    rejects_slo_misses: bool = True


def admit(prediction: Prediction, slo: SLO, limits: AdmissionLimits, *, num_queued_requests: int) -> None:
    """Return if the request may go on.

    ``num_queued_requests`` counts requests that were taken in and have not produced a token yet.

    Raises ``AdmissionRejectedError`` with reason ``queue_full``, ``ttft`` or ``itl`` and a time after which the
    backlog that caused it should be gone.
    """
    if num_queued_requests >= limits.max_queued_requests:
        raise AdmissionRejectedError(
            f"{num_queued_requests} requests are waiting, the limit is {limits.max_queued_requests}",
            "queue_full",
            _MIN_RETRY_S,
        )
    if not limits.rejects_slo_misses or prediction.is_idle or not prediction.is_calibrated:
        return
    if prediction.ttft_s > slo.ttft_s:
        raise AdmissionRejectedError(
            f"the first token is predicted after {prediction.ttft_s:.2f} s, the objective is {slo.ttft_s:.2f} s",
            "ttft",
            min(max(prediction.ttft_s - slo.ttft_s, _MIN_RETRY_S), _MAX_RETRY_S),
        )
    if prediction.itl_s > slo.itl_s:
        raise AdmissionRejectedError(
            f"tokens are predicted {prediction.itl_s * 1000:.0f} ms apart, the objective is {slo.itl_s * 1000:.0f} ms",
            "itl",
            _MIN_RETRY_S,
        )
