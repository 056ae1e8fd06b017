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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from epd.routing.cost_model import CostModel
from epd.types import SLO, MediaItem, ReplicaLoad, Request

EXPECTED_OUTPUT_TOKENS = 128
"""Output length assumed for a request that allows more (mean of the ServeGen image service)."""


@dataclass(frozen=True, slots=True)
class Affinity:
    """What replicas are known to hold: media embeddings by ``mm_hash``, and leading tokens of *this* prompt's KV."""

    embeddings: Mapping[str, frozenset[str]] = field(default_factory=dict)
    prefix_tokens: Mapping[str, int] = field(default_factory=dict)


class Figures(NamedTuple):
    """The numbers of a ``Prediction``, cheap enough to make for every candidate."""

    ttft_s: float
    itl_s: float
    stall_s: float
    work_s: float
    attainment: float


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


class Harm(NamedTuple):
    """What a placement does to running decodes: how many it pushes over their ITL, the gap they see, summed delay."""

    num_missed: float
    stall_s: float
    delay_s: float

    def beside(self, other: Harm) -> Harm:
        """Add up harm done at two different replicas."""
        if other is _NO_HARM:
            return self
        return Harm(self.num_missed + other.num_missed, max(self.stall_s, other.stall_s), self.delay_s + other.delay_s)


_NO_HARM = Harm(0.0, 0.0, 0.0)


class _PrefillSide(NamedTuple):
    ttft_s: float
    work_s: float
    gap_s: float
    harm: Harm


class _DecodeSide(NamedTuple):
    itl_s: float
    itl_chance: float
    gap_s: float
    wait_s: float
    harm: Harm


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """Media items spread over encoders: one worker an item in prompt order, and what that costs whom."""

    assigned: tuple[Worker, ...]
    ready_s: float
    work_s: float
    harm: Harm
    number: int
    """Tells the plans of one request apart."""


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
        self._kv_transfer_s = cost_model.kv_transfer_s(self.num_tokens)
        num_choices = request.sampling.n
        # What decoding adds to the steps of whoever does it, which is the same everywhere.
        marginal_s = cost_model.decode_step_s(num_choices, num_choices * self.num_tokens)
        self._decode_work_s = self.num_output_tokens * (marginal_s - cost_model.decode_step_s(0, 0))
        self._prefill_sides: dict[tuple[int | None, str], _PrefillSide] = {}
        self._decode_sides: dict[tuple[str, float], _DecodeSide] = {}
        self._num_plans = 0

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
                finish + (0.0 if item.mm_hash in held else item_s) for finish, held in zip(finish_s, holds, strict=True)
            ]
            best = min(range(len(encoders)), key=after_s.__getitem__)
            finish_s[best] = after_s[best]
            chosen[position] = best
        return self._plan(encoders, [chosen[i] for i in range(len(items))], holds)

    def _plan(self, encoders: Sequence[Worker], chosen: Sequence[int], holds: Sequence[frozenset[str]]) -> EncodePlan:
        ready_s = work_s = 0.0
        harm = _NO_HARM
        for index in dict.fromkeys(chosen):
            items = [item for item, choice in zip(self.request.items, chosen, strict=True) if choice == index]
            prepare_s, encode_s = self._media_s(items, holds[index])
            transfer_s = self.cost_model.embedding_transfer_s(sum(item.num_tokens for item in items))
            worker = encoders[index]
            backlog_s = worker.backlog_s if encode_s else 0.0
            ready_s = max(ready_s, backlog_s + prepare_s + encode_s + transfer_s)
            work_s += prepare_s + encode_s + transfer_s
            if worker.load.num_running:
                harm = harm.beside(self._harm(worker, worker.step_s + max(worker.interference_s, encode_s)))
        self._num_plans += 1
        assigned = tuple(encoders[index] for index in chosen)
        return EncodePlan(assigned, ready_s, work_s, harm, self._num_plans)

    def _media_s(self, items: Sequence[MediaItem], held: frozenset[str]) -> tuple[float, float]:
        counts = [item.num_patches for item in items if item.mm_hash not in held]
        return self.cost_model.preprocess_s(counts), self.cost_model.encode_s(counts)

    # -- placements

    def figures(self, plan: EncodePlan | None, prefill: Worker, decode: Worker) -> Figures:
        """Predict one placement; without a ``plan``, items are encoded by the prefill replica.

        The encoders of a plan must be other replicas than the other two. What depends on one replica only is computed
        once and kept, since the placements of a request are combinations of few replicas.
        """
        prefill_side = self._prefill_side(plan, prefill)
        ttft_s, work_s, harm = prefill_side.ttft_s, prefill_side.work_s, prefill_side.harm
        decode_side = self._decode_side(decode, 0.0 if decode is prefill else self._kv_transfer_s)
        if decode is prefill:
            ttft_s += decode_side.wait_s
            harm = self._harm(prefill, max(prefill_side.gap_s, decode_side.gap_s))
        else:
            work_s += self._kv_transfer_s
            harm = harm.beside(decode_side.harm)
        if plan is not None:
            harm = harm.beside(plan.harm)
        attainment = _chance(ttft_s, self.slo.ttft_s) * decode_side.itl_chance - harm.num_missed
        work_s += self._decode_work_s + harm.delay_s
        return Figures(ttft_s, decode_side.itl_s, harm.stall_s, work_s, attainment)

    def predict(self, plan: EncodePlan | None, prefill: Worker, decode: Worker) -> Prediction:
        """Return ``figures`` with what admission asks beside them."""
        used = [prefill, decode, *(plan.assigned if plan is not None else ())]
        return Prediction(
            *self.figures(plan, prefill, decode),
            is_idle=all(worker.is_idle for worker in used),
            is_calibrated=self.cost_model.is_calibrated,
        )

    def _prefill_side(self, plan: EncodePlan | None, prefill: Worker) -> _PrefillSide:
        key = (None if plan is None else plan.number, prefill.replica_id)
        known = self._prefill_sides.get(key)
        if known is not None:
            return known
        cached = min(self.affinity.prefix_tokens.get(prefill.replica_id, 0), self.num_tokens - 1)
        num_chunks = -(-(self.num_tokens - cached) // self.max_num_batched_tokens)
        prefill_s = self.cost_model.prefill_s(self.num_tokens, cached)
        if plan is None:
            held = self.affinity.embeddings.get(prefill.replica_id, frozenset())
            ready_s, inline_s = self._media_s(self.request.items, held)
            media_work_s = ready_s + inline_s
        else:
            ready_s, inline_s, media_work_s = plan.ready_s, 0.0, plan.work_s
        ttft_s = max(prefill.backlog_s, ready_s) + inline_s + prefill_s + num_chunks * prefill.step_s
        gap_s = prefill.step_s + max(prefill.interference_s, inline_s, prefill_s / num_chunks)
        side = _PrefillSide(ttft_s, media_work_s + prefill_s, gap_s, self._harm(prefill, gap_s))
        self._prefill_sides[key] = side
        return side

    def _decode_side(self, decode: Worker, kv_transfer_s: float) -> _DecodeSide:
        """Predict the decode half.

        The p99 gap is the steady one, and in a short answer also the first, which waits for the KV blocks. What queues
        at the replica now stands for what will queue there while this request decodes.
        """
        key = (decode.replica_id, kv_transfer_s)
        known = self._decode_sides.get(key)
        if known is not None:
            return known
        load, num_choices = decode.load, self.request.sampling.n
        step_s = self.cost_model.decode_step_s(
            load.num_running + num_choices, load.num_context_tokens + num_choices * self.num_tokens
        )
        gap_s = step_s + decode.interference_s
        wait_s = self._block_wait_s(decode)
        itl_s = gap_s
        if self.num_output_tokens < 2:
            itl_s = 0.0
        elif self.num_output_tokens <= 100 and kv_transfer_s:
            itl_s = max(gap_s, kv_transfer_s + step_s + wait_s)
        side = _DecodeSide(itl_s, _chance(itl_s, self.slo.itl_s), gap_s, wait_s, self._harm(decode, gap_s))
        self._decode_sides[key] = side
        return side

    def _block_wait_s(self, worker: Worker) -> float:
        """Predict the wait for KV blocks, if too few are free, as a share of the time that running decodes go on."""
        load = worker.load
        if not (load.num_blocks and load.block_size):
            return 0.0
        short = -(-(self.num_tokens + 1) // load.block_size) - load.num_free_blocks
        if short <= 0:
            return 0.0
        return worker.step_s * EXPECTED_OUTPUT_TOKENS * min(1.0, short / load.num_blocks)

    def _harm(self, worker: Worker, gap_s: float) -> Harm:
        """Predict what a gap of ``gap_s`` does to the decodes that run at a replica."""
        running = worker.load.num_running
        if not running:
            return _NO_HARM
        before_s = worker.step_s + worker.interference_s
        num_missed = running * (_chance(before_s, self.slo.itl_s) - _chance(gap_s, self.slo.itl_s))
        return Harm(num_missed, gap_s, running * (gap_s - before_s))


def _chance(predicted_s: float, limit_s: float) -> float:
    """Return the chance that a time predicted as ``predicted_s`` is within ``limit_s``: 1/2 when they are equal."""
    ratio = predicted_s / limit_s
    if ratio > 100.0:
        return 0.0
    # To the eighth power: a prediction error of about 20 %.
    ratio *= ratio
    ratio *= ratio
    return 1.0 / (1.0 + ratio * ratio)
