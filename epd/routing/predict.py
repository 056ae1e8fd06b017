"""What a placement would mean: the request's TTFT and ITL, and the gap it tears into decodes that share its workers.

Owns the composition of stage costs over a request's path and over the load that replicas report. Knows nothing of
modes, of which placements are possible, or of how one is chosen. Pure: no clock, no state outside one request.

The picture behind the arithmetic, for a split request::

    encoder  |---backlog---|-preprocess-|--encode--|-transfer-|
    prefill  |------backlog------|                            |--prefill--|        TTFT ends here
    decode   |  step  step  step  ...                                     |-KV-|step|step ...

A fused stage has no transfer, and its encode and prefill are steps of the same worker: every decode running there
waits for the longest of them, the one term that chunking cannot bound below one encode batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from epd.routing.cost_model import CostModel
from epd.types import SLO, MediaItem, ReplicaLoad, Request

EXPECTED_OUTPUT_TOKENS = 128
"""Output length assumed for a request that allows more (mean of the ServeGen image service)."""

_SHARPNESS = 8
"""How steeply the chance of meeting an objective falls around it; 8 is a prediction error of about 20 %."""


@dataclass(frozen=True, slots=True)
class Affinity:
    """What replicas are known to hold: media embeddings by ``mm_hash``, and leading tokens of *this* prompt's KV."""

    embeddings: Mapping[str, frozenset[str]] = field(default_factory=dict)
    prefix_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The outcome expected of one placement.

    ``itl_s`` predicts the request's own p99 gap. ``stall_s`` is the longest gap that decodes sharing its workers would
    see because of it, 0 if none run there. ``work_s`` sums the busy seconds it costs, delays of others included.
    ``attainment`` is the expected change in the number of requests that meet their SLO: the chance that this one
    does, less the running decodes that it pushes over theirs.
    """

    ttft_s: float
    itl_s: float
    stall_s: float
    work_s: float
    attainment: float
    is_idle: bool
    is_calibrated: bool

    def meets(self, slo: SLO) -> bool:
        return self.ttft_s <= slo.ttft_s and self.itl_s <= slo.itl_s


@dataclass(frozen=True, slots=True)
class Worker:
    """A replica's load in seconds: queued work, its decode step, and the longest gap that the queue adds to a step."""

    load: ReplicaLoad
    backlog_s: float
    step_s: float
    interference_s: float

    @property
    def replica_id(self) -> str:
        return self.load.replica_id

    @property
    def is_idle(self) -> bool:
        load = self.load
        return not (
            load.num_waiting or load.num_running or load.num_queued_prefill_tokens or load.num_queued_encode_items
        )


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """Media items spread over encoders: one worker an item in prompt order, and what that costs."""

    assigned: tuple[Worker, ...]
    batches: tuple[tuple[Worker, float], ...]
    ready_s: float
    work_s: float


def queue_weight_s(cost_model: CostModel) -> tuple[float, float, float, float]:
    """Return linear weights (a queued item, patch, prefill token, running decode) to rank replicas cheaply."""
    encode, prefill = cost_model.encode, cost_model.prefill
    return (encode.fixed_s, encode.per_patch_s, prefill.per_token_s, cost_model.decode.small.per_sequence_s)


class Predictor:
    """Predictions for one request. Holds what does not depend on the replicas, so that a placement costs little."""

    def __init__(
        self, request: Request, slo: SLO, cost_model: CostModel, affinity: Affinity, max_num_batched_tokens: int
    ) -> None:
        self.request = request
        self.slo = slo
        self.cost_model = cost_model
        self.affinity = affinity
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_tokens = max(1, request.num_prefill_tokens)
        remaining = max(1, request.sampling.max_tokens - len(request.output_token_ids))
        self.num_output_tokens = min(remaining, EXPECTED_OUTPUT_TOKENS)
        self._num_choices = request.sampling.n

    # -- replicas

    def worker(self, load: ReplicaLoad) -> Worker:
        """Turn a replica's counts into seconds."""
        cost_model = self.cost_model
        encode_s = one_item_s = prefill_s = chunk_s = step_s = 0.0
        if load.num_queued_encode_items:
            mean_patches = load.num_queued_encode_patches // load.num_queued_encode_items
            one_item_s = cost_model.encode_s((mean_patches,))
            encode_s = load.num_queued_encode_items * one_item_s
        if load.num_queued_prefill_tokens:
            num_requests = max(1, load.num_waiting)
            mean_tokens = -(-load.num_queued_prefill_tokens // num_requests)
            prefill_s = num_requests * cost_model.prefill_s(mean_tokens)
            chunk_s = cost_model.prefill_s(min(load.num_queued_prefill_tokens, self.max_num_batched_tokens))
        if load.num_running:
            step_s = cost_model.decode_step_s(load.num_running, load.num_context_tokens)
            num_chunks = -(-load.num_queued_prefill_tokens // self.max_num_batched_tokens)
            prefill_s += num_chunks * step_s
        return Worker(load, encode_s + prefill_s, step_s, max(one_item_s, chunk_s))

    def spread(self, encoders: Sequence[Worker]) -> EncodePlan:
        """Give every item an encoder: longest first, each to whoever would finish it first. Earlier ones win ties."""
        cost_model, items = self.cost_model, self.request.items
        finish_s = [worker.backlog_s for worker in encoders]
        holds = [self.affinity.embeddings.get(worker.replica_id, frozenset()) for worker in encoders]
        chosen: dict[int, int] = {}
        for position in sorted(range(len(items)), key=lambda i: (-items[i].num_patches, i)):
            item = items[position]
            counts = (item.num_patches,)
            item_s = cost_model.preprocess_s(counts) + cost_model.encode_s(counts)
            after_s = [
                finish + (0.0 if item.mm_hash in held else item_s)
                for finish, held in zip(finish_s, holds, strict=True)
            ]
            best = min(range(len(encoders)), key=after_s.__getitem__)
            finish_s[best] = after_s[best]
            chosen[position] = best
        return self._plan(encoders, [chosen[i] for i in range(len(items))], holds)

    def _plan(self, encoders: Sequence[Worker], chosen: Sequence[int], holds: Sequence[frozenset[str]]) -> EncodePlan:
        ready_s = work_s = 0.0
        batches = []
        for index in dict.fromkeys(chosen):
            items = [item for item, choice in zip(self.request.items, chosen, strict=True) if choice == index]
            prepare_s, encode_s = self._media_s(items, holds[index])
            transfer_s = self.cost_model.embedding_transfer_s(sum(item.num_tokens for item in items))
            worker = encoders[index]
            backlog_s = worker.backlog_s if encode_s else 0.0
            ready_s = max(ready_s, backlog_s + prepare_s + encode_s + transfer_s)
            work_s += prepare_s + encode_s + transfer_s
            batches.append((worker, encode_s))
        return EncodePlan(tuple(encoders[index] for index in chosen), tuple(batches), ready_s, work_s)

    def _media_s(self, items: Sequence[MediaItem], held: frozenset[str]) -> tuple[float, float]:
        counts = [item.num_patches for item in items if item.mm_hash not in held]
        return self.cost_model.preprocess_s(counts), self.cost_model.encode_s(counts)

    # -- placements

    def predict(self, plan: EncodePlan | None, prefill: Worker, decode: Worker) -> Prediction:
        """Predict one placement; without a ``plan``, items are encoded by the prefill replica."""
        cost_model = self.cost_model
        is_split = decode is not prefill
        cached = min(self.affinity.prefix_tokens.get(prefill.replica_id, 0), self.num_tokens - 1)
        num_chunks = -(-(self.num_tokens - cached) // self.max_num_batched_tokens)
        prefill_s = cost_model.prefill_s(self.num_tokens, cached)
        if plan is None:
            held = self.affinity.embeddings.get(prefill.replica_id, frozenset())
            ready_s, inline_s = self._media_s(self.request.items, held)
            media_work_s = ready_s + inline_s
        else:
            ready_s, inline_s, media_work_s = plan.ready_s, 0.0, plan.work_s
        ttft_s = max(prefill.backlog_s, ready_s) + inline_s + prefill_s + num_chunks * prefill.step_s
        if not is_split:
            ttft_s += self._block_wait_s(decode)
        step_after_s = self._step_after_s(decode)
        kv_transfer_s = cost_model.kv_transfer_s(self.num_tokens) if is_split else 0.0
        itl_s = self._itl_s(decode, step_after_s, kv_transfer_s, is_split)

        chunk_s = prefill_s / num_chunks
        gaps = [(prefill, prefill.step_s + max(prefill.interference_s, inline_s, chunk_s))]
        gaps.append((decode, step_after_s + decode.interference_s))
        if plan is not None:
            gaps += [(worker, worker.step_s + max(worker.interference_s, batch_s)) for worker, batch_s in plan.batches]
        harmed, stall_s, delay_s = self._harm(gaps)
        marginal_s = cost_model.decode_step_s(self._num_choices, self._num_choices * self.num_tokens)
        marginal_s -= cost_model.decode_step_s(0, 0)
        used = [worker for worker, _ in gaps]
        return Prediction(
            ttft_s=ttft_s,
            itl_s=itl_s,
            stall_s=stall_s,
            work_s=media_work_s + prefill_s + kv_transfer_s + self.num_output_tokens * marginal_s + delay_s,
            attainment=_chance(ttft_s, self.slo.ttft_s) * _chance(itl_s, self.slo.itl_s) - harmed,
            is_idle=all(worker.is_idle for worker in used),
            is_calibrated=cost_model.is_calibrated,
        )

    def _step_after_s(self, decode: Worker) -> float:
        load = decode.load
        return self.cost_model.decode_step_s(
            load.num_running + self._num_choices, load.num_context_tokens + self._num_choices * self.num_tokens
        )

    def _itl_s(self, decode: Worker, step_after_s: float, kv_transfer_s: float, is_split: bool) -> float:
        """Predict the p99 gap: the steady one, and in a short answer also the first, which waits for the KV blocks.

        What queues at the replica now stands for what will queue there while this request decodes.
        """
        if self.num_output_tokens < 2:
            return 0.0
        steady_s = step_after_s + decode.interference_s
        if not is_split or self.num_output_tokens > 100:
            return steady_s
        return max(steady_s, kv_transfer_s + step_after_s + self._block_wait_s(decode))

    def _block_wait_s(self, worker: Worker) -> float:
        """Predict the wait for KV blocks, if too few are free, as a share of the time that running decodes go on."""
        load = worker.load
        if not (load.num_blocks and load.block_size):
            return 0.0
        short = -(-(self.num_tokens + 1) // load.block_size) - load.num_free_blocks
        if short <= 0:
            return 0.0
        return worker.step_s * EXPECTED_OUTPUT_TOKENS * min(1.0, short / load.num_blocks)

    def _harm(self, gaps: Sequence[tuple[Worker, float]]) -> tuple[float, float, float]:
        """Return (running decodes pushed over their ITL, longest gap they see, summed delay) over distinct workers."""
        longest: dict[str, tuple[Worker, float]] = {}
        for worker, gap_s in gaps:
            known = longest.get(worker.replica_id)
            if known is None or gap_s > known[1]:
                longest[worker.replica_id] = (worker, gap_s)
        harmed = stall_s = delay_s = 0.0
        for worker, gap_s in longest.values():
            running = worker.load.num_running
            if running:
                before_s = worker.step_s + worker.interference_s
                harmed += running * (_chance(before_s, self.slo.itl_s) - _chance(gap_s, self.slo.itl_s))
                delay_s += running * (gap_s - before_s)
                stall_s = max(stall_s, gap_s)
        return harmed, stall_s, delay_s


def _chance(predicted_s: float, limit_s: float) -> float:
    """Return the chance that a time predicted as ``predicted_s`` is within ``limit_s``: 1/2 when they are equal."""
    ratio = min(predicted_s / limit_s, 100.0) if limit_s > 0 else 100.0
    return float(1.0 / (1.0 + math.pow(ratio, _SHARPNESS)))
