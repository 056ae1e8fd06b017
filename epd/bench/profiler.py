"""Measure a running deployment stage by stage and fit the router's cost model to it.

Owns the measurement plan and the reading of traces. Everything comes over HTTP: image and text requests one at a time,
whose ``epd`` trace carries stage timings and bytes, and groups of concurrent streams, whose token times give the
decode step. Knows nothing of how the server is built. Run it against an otherwise idle deployment.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
import numpy as np

from epd.bench.client import Contender, Due, run_open_loop, send
from epd.bench.metrics import RequestTimeline
from epd.bench.runner import Progress
from epd.bench.workload import RequestShape, WorkItem, request_body
from epd.errors import EpdError
from epd.routing.cost_model import (
    CostModel,
    CostSource,
    CostStage,
    DecodeCost,
    DecodeRegime,
    EncodeCost,
    PrefillCost,
    PreprocessCost,
    ProfileKey,
    TransferCost,
)
from epd.routing.fit import Sample, fit
from epd.routing.priors import guess_device

_MARKERS_PER_IMAGE = 2
"""Tokens around each image's placeholders in the prompt (start and end of vision)."""

_SEGMENTS_PER_RUN = 4
_DECODE_TOKENS = 33


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """Sizes to measure, about 60 points a stage by default; sizes that the server refuses (400) are left out."""

    image_sides: tuple[int, ...]
    image_counts: tuple[int, ...]
    prompt_words: tuple[int, ...]
    decode_batches: tuple[int, ...]
    decode_words: tuple[int, ...]

    @staticmethod
    def of(num_points: int, max_prompt_words: int, max_image_side: int, max_batch: int) -> ProfilePlan:
        """Spread sizes evenly in the square root, so that small ones, which are the most common, get more points."""
        counts = (1, 1, 2, 4)
        batches = [2**power for power in range(max(1, max_batch).bit_length())]
        num_decode_words = max(2, math.ceil(num_points / _SEGMENTS_PER_RUN / len(batches)))
        return ProfilePlan(
            image_sides=_spread(56, max_image_side, max(3, num_points // len(counts))),
            image_counts=counts,
            prompt_words=_spread(4, max_prompt_words, max(4, num_points)),
            decode_batches=tuple(batches),
            decode_words=_spread(4, max_prompt_words // 2, num_decode_words),
        )

    @property
    def num_requests(self) -> int:
        num_decode = sum(self.decode_batches) * len(self.decode_words)
        return len(self.image_sides) * len(self.image_counts) + len(self.prompt_words) + num_decode


def _spread(low: int, high: int, num_values: int) -> tuple[int, ...]:
    roots = np.linspace(math.sqrt(low), math.sqrt(max(low + 1, high)), num_values)
    return tuple(round(float(root) ** 2) for root in roots)


@dataclass(slots=True)
class Measurements:
    """Samples by stage, and bytes a token as seen in transfers."""

    samples: dict[CostStage, list[Sample]] = field(default_factory=dict)
    embedding_bytes_per_token: list[float] = field(default_factory=list)
    kv_bytes_per_token: list[float] = field(default_factory=list)

    def add(self, stage: CostStage, terms: tuple[float, ...], seconds: float) -> None:
        if seconds > 0:
            self.samples.setdefault(stage, []).append(Sample(terms, seconds))


async def measure(
    client: httpx.AsyncClient,
    contender: Contender,
    plan: ProfilePlan,
    *,
    patches_per_token: int = 4,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Measurements:
    """Send the plan's requests. Raises ``EpdError`` if the server fails one, or sends no trace."""
    probe = _Probe(client, contender, plan.num_requests, on_progress)
    # The mode that splits most shows most: its trace has the transfers too.
    media_mode = await probe.first_mode(("epd", "e_pd", "aggregated", "ep_d"))
    text_mode = await probe.first_mode(("epd", "ep_d", "aggregated", "e_pd"))
    result = Measurements()
    base = await probe.one("start", media_mode, RequestShape(0, 0, 0, 1, 2), fixed_text=True)
    for side, count in itertools.product(plan.image_sides, plan.image_counts):
        shape = RequestShape(count, side, side, 1, 2)
        timeline = await probe.one("images", media_mode, shape, fixed_text=True)
        if timeline and base:
            image_tokens = timeline.num_prompt_tokens - base.num_prompt_tokens - _MARKERS_PER_IMAGE * count
            add_image_samples(result, timeline, image_tokens, count, patches_per_token)
    for words in plan.prompt_words:
        timeline = await probe.one("prompts", text_mode, RequestShape(0, 0, 0, words, 2))
        if timeline:
            add_prompt_samples(result, timeline)
    for batch, words in itertools.product(plan.decode_batches, plan.decode_words):
        timelines = await probe.together("decode", text_mode, RequestShape(0, 0, 0, words, _DECODE_TOKENS), batch)
        add_decode_samples(result, timelines)
    return result


class _Probe:
    """Sends requests in a given mode, never twice the same, and tells progress."""

    def __init__(
        self, client: httpx.AsyncClient, contender: Contender, num_total: int, on_progress: Callable[[Progress], None]
    ) -> None:
        self._client = client
        self._contender = contender
        self._num_total = num_total
        self._on_progress = on_progress
        self._num_done = 0
        self._next_index = 0

    async def first_mode(self, modes: Sequence[str]) -> str:
        refusal = ""
        for mode in modes:
            timeline = await send(self._client, self._contender, self._due(mode, RequestShape(1, 112, 112, 4, 2)))
            if timeline.status != 400:
                _check(timeline)
                return mode
            refusal = timeline.error
        raise EpdError(f"the server accepts none of the modes {', '.join(modes)}: {refusal}")

    async def one(
        self, label: str, mode: str, shape: RequestShape, *, fixed_text: bool = False
    ) -> RequestTimeline | None:
        timelines = await self.together(label, mode, shape, 1, fixed_text=fixed_text)
        return timelines[0] if timelines else None

    async def together(
        self, label: str, mode: str, shape: RequestShape, batch: int, *, fixed_text: bool = False
    ) -> list[RequestTimeline]:
        """Send ``batch`` equal requests at once; returns none if the server refuses the size."""
        requests = [self._due(mode, shape, fixed_text=fixed_text) for _ in range(batch)]
        timelines = await run_open_loop(self._client, self._contender, requests)
        self._num_done += batch
        self._on_progress(Progress(label, min(self._num_done, self._num_total), self._num_total))
        if any(timeline.status == 400 for timeline in timelines):
            return []
        for timeline in timelines:
            _check(timeline)
        return timelines

    def _due(self, mode: str, shape: RequestShape, *, fixed_text: bool = False) -> Due:
        self._next_index += 1
        first_image = self._next_index * 1000
        seeds = tuple(range(first_image, first_image + shape.num_images))
        item = WorkItem(0 if fixed_text else self._next_index, 0.0, shape, seeds)
        # Loose objectives: a sample that admission turns away measures nothing.
        options = {"epd": {"mode": mode, "trace": True, "slo": {"ttft_s": 3600, "itl_s": 3600}}}
        return Due(self._next_index, 0.0, request_body(item, model=self._contender.model, options=options))


def _check(timeline: RequestTimeline) -> None:
    if timeline.error:
        raise EpdError(f"a profiling request failed: {timeline.error}")
    if not timeline.trace.get("timings_ms"):
        raise EpdError("the server sends no epd trace; only a deployment of this project can be profiled")


def _timing_s(timeline: RequestTimeline, stage: CostStage) -> float:
    return float(timeline.trace["timings_ms"].get(stage.value) or 0.0) / 1000


def _bytes(timeline: RequestTimeline, kind: str) -> float:
    return float((timeline.trace.get("bytes") or {}).get(kind) or 0)


def add_image_samples(
    result: Measurements, timeline: RequestTimeline, image_tokens: int, num_images: int, patches_per_token: int
) -> None:
    """Read preprocess, encode and embedding transfer off one traced request of equal images."""
    if image_tokens <= 0 or (timeline.trace.get("cached") or {}).get("embedding_items"):
        return
    patches = image_tokens * patches_per_token / num_images
    placement = timeline.trace.get("placement") or {}
    # Reports of several encoders add up, so each pays its fixed part.
    num_encoders = max(1, len(set(placement.get("encode") or ())))
    result.add(CostStage.PREPROCESS, (num_images, num_images * patches), _timing_s(timeline, CostStage.PREPROCESS))
    encode_terms = (num_encoders, num_images * patches, num_images * patches**2)
    result.add(CostStage.ENCODE, encode_terms, _timing_s(timeline, CostStage.ENCODE))
    moved_bytes = _bytes(timeline, "embedding")
    if moved_bytes:
        seconds = _timing_s(timeline, CostStage.EMBEDDING_TRANSFER)
        result.add(CostStage.EMBEDDING_TRANSFER, (num_encoders, moved_bytes), seconds)
        result.embedding_bytes_per_token.append(moved_bytes / image_tokens)


def add_prompt_samples(result: Measurements, timeline: RequestTimeline) -> None:
    """Read prefill and KV transfer off one traced text request."""
    num_tokens = timeline.num_prompt_tokens
    cached = int((timeline.trace.get("cached") or {}).get("prefix_tokens") or 0)
    terms = (1, num_tokens - cached, num_tokens**2 - cached**2)
    result.add(CostStage.PREFILL, terms, _timing_s(timeline, CostStage.PREFILL))
    moved_bytes = _bytes(timeline, "kv")
    if moved_bytes:
        result.add(CostStage.KV_TRANSFER, (1, moved_bytes), _timing_s(timeline, CostStage.KV_TRANSFER))
        result.kv_bytes_per_token.append(moved_bytes / num_tokens)


def add_decode_samples(result: Measurements, timelines: Sequence[RequestTimeline]) -> None:
    """Read decode steps off streams that ran together, one group a decode replica.

    Only the time in which all of a group's streams were decoding counts: from the last one's first token to the first
    one's last token. It is cut into segments, over which the context grows.
    """
    groups: dict[str, list[RequestTimeline]] = {}
    for timeline in timelines:
        replica_id = str((timeline.trace.get("placement") or {}).get("decode"))
        groups.setdefault(replica_id, []).append(timeline)
    for group in groups.values():
        start_s = max(timeline.token_at_s[0] for timeline in group)
        end_s = min(timeline.token_at_s[-1] for timeline in group)
        for segment in range(_SEGMENTS_PER_RUN):
            width_s = (end_s - start_s) / _SEGMENTS_PER_RUN
            low_s, high_s = start_s + segment * width_s, start_s + (segment + 1) * width_s
            gaps_s: list[float] = []
            num_context_tokens = 0.0
            for timeline in group:
                times = timeline.token_at_s
                # A chunk may carry several tokens; the step is then a part of the gap between chunks.
                tokens_per_chunk = max(1.0, timeline.num_output_tokens / len(times))
                gaps_s += [
                    (late - early) / tokens_per_chunk
                    for early, late in itertools.pairwise(times)
                    if low_s <= early and late <= high_s
                ]
                made = sum(time_s <= (low_s + high_s) / 2 for time_s in times) * tokens_per_chunk
                num_context_tokens += timeline.num_prompt_tokens + made
            if gaps_s:
                result.add(CostStage.DECODE, (1, num_context_tokens, len(group)), float(np.median(gaps_s)))


def fit_cost_model(measurements: Measurements, key: ProfileKey) -> CostModel:
    """Fit every stage. Transfers that the deployment's modes do not have keep a guess.

    Raises ``EpdError`` if encode, prefill or decode has too few samples.
    """
    errors: dict[str, float] = {}

    def parameters(stage: CostStage, otherwise: tuple[float, ...] | None = None) -> tuple[float, ...]:
        try:
            fitted = fit(measurements.samples.get(stage, []))
        except ValueError as error:
            if otherwise is not None:
                return otherwise
            raise EpdError(f"cannot fit {stage.value}: {error}") from error
        if math.isfinite(fitted.hold_out_error):
            errors[stage.value] = fitted.hold_out_error
        return fitted.parameters

    guess = guess_device(key.device, key.dtype)
    transfer = (guess.transfer_fixed_s, 1 / guess.transfer_bytes_per_s)
    preprocess_s = parameters(CostStage.PREPROCESS, (guess.preprocess_fixed_s, guess.preprocess_per_patch_s))
    # The batches of a profile run are small; a second regime needs batches that saturate compute.
    regime = DecodeRegime(*parameters(CostStage.DECODE))
    return CostModel(
        key=key,
        source=CostSource.PROFILE,
        preprocess=PreprocessCost(fixed_s=preprocess_s[0], per_patch_s=preprocess_s[1]),
        encode=EncodeCost(*parameters(CostStage.ENCODE)),
        prefill=PrefillCost(*parameters(CostStage.PREFILL)),
        decode=DecodeCost(small=regime, large=regime, large_from_sequences=64),
        embedding_transfer=TransferCost(*parameters(CostStage.EMBEDDING_TRANSFER, transfer)),
        kv_transfer=TransferCost(*parameters(CostStage.KV_TRANSFER, transfer)),
        embedding_bytes_per_token=_median(measurements.embedding_bytes_per_token),
        kv_bytes_per_token=_median(measurements.kv_bytes_per_token),
        hold_out_error=errors,
    )


def num_samples(measurements: Measurements) -> Mapping[str, int]:
    """Return how many samples each stage got."""
    return {stage.value: len(measurements.samples.get(stage, ())) for stage in CostStage}


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else 0.0
