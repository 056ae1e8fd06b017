"""The online correction of the cost model: one smoothed ratio a stage, learned from what requests report.

Owns the update rule and its error estimate. Pure: a correction is a value, the caller keeps the latest one. Knows
nothing of where reports come from or of metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from epd.routing.cost_model import CostModel, CostSource, CostStage
from epd.types import Placement, Request, StageReport

MIN_OBSERVATIONS = 8
"""Reports of a stage before priors count as calibrated for it."""

_MAX_LOG_RATIO = math.log(1000.0)
_MAX_LOG_STEP = math.log(4.0)


@dataclass(frozen=True, slots=True)
class Correction:
    """What a stage's predictions must be multiplied by, and how far off corrected predictions still are.

    ``ratio`` is a smoothed geometric mean of actual / predicted. ``error`` is the smoothed relative error of the
    corrected prediction, measured before each update, so it is an out-of-sample figure.
    """

    ratio: float = 1.0
    error: float = 0.0
    num_observations: int = 0

    def update(self, predicted_s: float, actual_s: float, *, smoothing: float = 0.1) -> Correction:
        """Return the correction after one more observation; ``predicted_s`` is the *uncorrected* prediction.

        The first observations weigh as a plain mean, later ones by ``smoothing``. Once it has settled, one outlier
        moves the ratio as if it were at most a factor of 4. Times that are not positive and finite teach nothing.
        """
        if not (0.0 < predicted_s < math.inf and 0.0 < actual_s < math.inf):
            return self
        weight = max(smoothing, 1.0 / (self.num_observations + 1))
        error = abs(predicted_s * self.ratio - actual_s) / actual_s
        step = math.log(actual_s) - math.log(predicted_s) - math.log(self.ratio)
        if self.num_observations >= MIN_OBSERVATIONS:
            step = min(max(step, -_MAX_LOG_STEP), _MAX_LOG_STEP)
        log_ratio = math.log(self.ratio) + weight * step
        return Correction(
            ratio=math.exp(min(max(log_ratio, -_MAX_LOG_RATIO), _MAX_LOG_RATIO)),
            error=self.error + weight * (error - self.error),
            num_observations=self.num_observations + 1,
        )


Corrections = Mapping[CostStage, Correction]


def correct(cost_model: CostModel, corrections: Corrections) -> CostModel:
    """Return the cost model with the corrections applied.

    Priors become calibrated (``OBSERVED``) once prefill and decode, which every request has, were seen often enough.
    """
    seen = [corrections.get(stage, Correction()).num_observations for stage in (CostStage.PREFILL, CostStage.DECODE)]
    source = cost_model.source
    if source is CostSource.PRIORS and min(seen) >= MIN_OBSERVATIONS:
        source = CostSource.OBSERVED
    return cost_model.scaled({stage: each.ratio for stage, each in corrections.items()}, source=source)


def predicted_stage_s(
    cost_model: CostModel, request: Request, placement: Placement, *, num_cached_tokens: int = 0
) -> dict[CostStage, float]:
    """Predict the seconds that a request's report will add up to, stage by stage, without queues and without decode.

    Stages that the placement does not have are absent.
    """
    result = {CostStage.PREFILL: cost_model.prefill_s(request.num_prefill_tokens, num_cached_tokens)}
    by_encoder: dict[str, list[int]] = {}
    moved_tokens: dict[str, int] = {}
    for item, encoder in zip(request.items, placement.encode, strict=True):
        by_encoder.setdefault(encoder, []).append(item.num_patches)
        if encoder != placement.prefill:
            moved_tokens[encoder] = moved_tokens.get(encoder, 0) + item.num_tokens
    if by_encoder:
        batches = by_encoder.values()
        result[CostStage.PREPROCESS] = sum(cost_model.preprocess_s(batch) for batch in batches)
        result[CostStage.ENCODE] = sum(cost_model.encode_s(batch) for batch in batches)
    if moved_tokens:
        result[CostStage.EMBEDDING_TRANSFER] = sum(cost_model.embedding_transfer_s(n) for n in moved_tokens.values())
    if placement.decode != placement.prefill:
        result[CostStage.KV_TRANSFER] = cost_model.kv_transfer_s(request.num_prefill_tokens)
    return result


def observe(
    corrections: Corrections,
    cost_model: CostModel,
    request: Request,
    placement: Placement,
    report: StageReport,
    *,
    predicted_step_s: float,
    num_output_tokens: int,
) -> dict[CostStage, Correction]:
    """Return the corrections after a finished request, given the uncorrected ``cost_model``.

    ``report`` is the sum of the request's reports; ``predicted_step_s`` the uncorrected decode step that its placement
    expected. Media stages are skipped when an embedding cache answered for an item: they were not run in full.
    """
    num_cached_tokens = report.cached.get("prefix_tokens", 0)
    predicted = predicted_stage_s(cost_model, request, placement, num_cached_tokens=num_cached_tokens)
    if report.cached.get("embedding_items", 0):
        predicted.pop(CostStage.ENCODE, None)
        predicted.pop(CostStage.PREPROCESS, None)
    timings = report.timings_s
    result = dict(corrections)
    for stage, predicted_s in predicted.items():
        actual_s = _prefill_alone_s(report, placement) if stage is CostStage.PREFILL else timings.get(stage.value, 0.0)
        result[stage] = result.get(stage, Correction()).update(predicted_s, actual_s)
    if num_output_tokens > 1:
        step_s = timings.get(CostStage.DECODE.value, 0.0) / (num_output_tokens - 1)
        result[CostStage.DECODE] = result.get(CostStage.DECODE, Correction()).update(predicted_step_s, step_s)
    return result


def _prefill_alone_s(report: StageReport, placement: Placement) -> float:
    """Return the prefill's own time: one that encodes in place is timed from its text on, so it holds the wait."""
    prefill_s = report.timings_s.get("prefill", 0.0)
    if placement.prefill in placement.encode:
        prefill_s -= sum(report.timings_s.get(name, 0.0) for name in ("preprocess", "encode_queue", "encode"))
    return prefill_s
