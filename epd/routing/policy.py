"""Choose which replicas run a request: enumerate what the pools can form, predict each, take the best.

Owns the enumeration of placements, its pruning, and the order of preference. Pure and deterministic: the same request,
loads and cost model give the same placement; ties are broken by the request's id (items: by the first item's hash, so
that a repeated image finds the encoder that has it), which spreads requests over equal replicas and over ingresses that
do not talk to each other. Knows nothing of clocks, HTTP, Ray or how loads were obtained.

Order of preference: most requests expected to meet their SLO; among those that miss it, the least late; then the least
work; then the replicas with the fewest spare roles, so that all-round workers stay free; then the lowest TTFT.

A *text-only* request keeps the mode that was asked for: ``e_pd`` prefills and decodes it in one replica and ``epd``
splits it like ``ep_d``; nothing is encoded, so every stage that runs is split as the mode says. Under ``auto`` the
equal shapes are tried once, under the first formable name.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from epd.config import formable_modes
from epd.errors import StageFailedError, UnsupportedModeError
from epd.routing.cost_model import CostModel
from epd.routing.predict import Affinity, EncodePlan, Figures, Prediction, Predictor, Worker, queue_weight_s
from epd.types import SLO, Mode, Placement, ReplicaLoad, Request, Stage

_CANDIDATES_PER_POOL = 2
_MAX_ENCODERS = 8


@dataclass(frozen=True, slots=True)
class Decision:
    """A placement, what is expected of it, and how many were compared."""

    placement: Placement
    prediction: Prediction
    num_considered: int


_REPORT_TRAVEL_S = 0.02
"""How old a replica's report may be when it arrives."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A request that was sent out, as ``anticipate`` needs it. Times are on the clock of ``reported_at_s``.

    ``first_token_at_s`` is when its first token came back, ``None`` before that.
    """

    request: Request
    placement: Placement
    sent_at_s: float
    first_token_at_s: float | None = None

    def is_unreported_at_prefill(self, load: ReplicaLoad) -> bool:
        """Whether a report was on its way before the request arrived. A report travels, too: hence the margin."""
        return load.reported_at_s < self.sent_at_s + _REPORT_TRAVEL_S

    def is_unreported_at_decode(self, load: ReplicaLoad) -> bool:
        """Whether a report cannot know of the decode, which starts after the first token and not when it is sent."""
        return self.first_token_at_s is None or load.reported_at_s < self.first_token_at_s + _REPORT_TRAVEL_S


def place(
    request: Request,
    loads: Sequence[ReplicaLoad],
    *,
    mode: Mode,
    slo: SLO,
    cost_model: CostModel,
    excluded: frozenset[str] = frozenset(),
    affinity: Affinity = Affinity(),  # noqa: B008 - immutable
    pools: Mapping[str, frozenset[Stage]] | None = None,
    max_num_batched_tokens: int = 1024,
) -> Placement:
    """Return the placement that ``decide`` chooses. Same arguments and errors."""
    return decide(
        request,
        loads,
        mode=mode,
        slo=slo,
        cost_model=cost_model,
        excluded=excluded,
        affinity=affinity,
        pools=pools,
        max_num_batched_tokens=max_num_batched_tokens,
    ).placement


def decide(
    request: Request,
    loads: Sequence[ReplicaLoad],
    *,
    mode: Mode,
    slo: SLO,
    cost_model: CostModel,
    excluded: frozenset[str] = frozenset(),
    affinity: Affinity = Affinity(),  # noqa: B008 - immutable
    pools: Mapping[str, frozenset[Stage]] | None = None,
    max_num_batched_tokens: int = 1024,
) -> Decision:
    """Place one request.

    ``loads`` holds the live replicas; those in ``excluded`` are never used. ``pools`` gives the roles of the configured
    pools, so that a pool without live replicas still counts as configured; by default it is read off ``loads``.

    Raises ``UnsupportedModeError`` if the pools cannot form the mode, naming those that they can, and
    ``StageFailedError`` if they could but too few replicas are left.
    """
    roles = dict(pools) if pools is not None else {load.pool: load.roles for load in loads}
    modes = _modes_to_try(mode, roles, has_media=bool(request.items))
    predictor = Predictor(request, slo, cost_model, affinity, max_num_batched_tokens)
    search = _Search(predictor, [load for load in loads if load.replica_id not in excluded])
    best: _Candidate | None = None
    best_rank: tuple[float, ...] = ()
    num_considered = 0
    for candidate in search.candidates(modes):
        num_considered += 1
        figures = predictor.figures(candidate.plan, candidate.prefill, candidate.decode)
        rank = _rank(figures, slo, candidate.spare_roles)
        if best is None or rank < best_rank:
            best, best_rank = candidate, rank
    if best is None:
        raise _no_replica_left(mode, search, has_media=bool(request.items))
    candidate, prediction = best, predictor.predict(best.plan, best.prefill, best.decode)
    reason = _reason(candidate.mode, mode, prediction, slo, num_considered)
    return Decision(_placement(request, candidate, reason), prediction, num_considered)


def anticipate(loads: Sequence[ReplicaLoad], dispatches: Sequence[Dispatch]) -> list[ReplicaLoad]:
    """Add to each replica's load what was sent to it after its report, so that a burst does not pile onto one replica.

    Prefill and encode work joins the queues at once; the decode joins the running batch.
    """
    by_id = {load.replica_id: load for load in loads}
    for dispatch in dispatches:
        request, placement = dispatch.request, dispatch.placement
        num_tokens, num_choices = request.num_prefill_tokens, request.sampling.n
        for item, replica_id in zip(request.items, placement.encode, strict=True):
            load = by_id.get(replica_id)
            if load is not None and dispatch.is_unreported_at_prefill(load):
                by_id[replica_id] = replace(
                    load,
                    num_queued_encode_items=load.num_queued_encode_items + 1,
                    num_queued_encode_patches=load.num_queued_encode_patches + item.num_patches,
                )
        load = by_id.get(placement.prefill)
        if load is not None and dispatch.is_unreported_at_prefill(load):
            by_id[placement.prefill] = replace(
                load,
                num_waiting=load.num_waiting + 1,
                num_queued_prefill_tokens=load.num_queued_prefill_tokens + num_tokens,
            )
        load = by_id.get(placement.decode)
        is_split = placement.decode != placement.prefill
        if load is not None and is_split and dispatch.is_unreported_at_decode(load):
            num_blocks = -(-num_tokens // load.block_size) if load.block_size else 0
            by_id[placement.decode] = replace(
                load,
                num_running=load.num_running + num_choices,
                num_context_tokens=load.num_context_tokens + num_choices * num_tokens,
                num_free_blocks=max(0, load.num_free_blocks - num_blocks),
            )
    return list(by_id.values())


# --------------------------------------------------------------------------------------------------------------------


class _Candidate(NamedTuple):
    mode: Mode
    plan: EncodePlan | None
    prefill: Worker
    decode: Worker
    spare_roles: int


class _Search:
    """Enumerates feasible placements over the least loaded replicas of each pool."""

    def __init__(self, predictor: Predictor, loads: Sequence[ReplicaLoad]) -> None:
        self._predictor = predictor
        self._workers: dict[str, Worker] = {}
        self._shortlists: dict[tuple[str, int], list[Worker]] = {}
        self._plans: dict[tuple[str, ...], tuple[EncodePlan, int]] = {}
        self.pools: dict[str, list[ReplicaLoad]] = {}
        for load in loads:
            self.pools.setdefault(load.pool, []).append(load)
        # Replicas of one pool are identical (DESIGN section 2), so the first one speaks for all.
        self.roles = {pool: members[0].roles for pool, members in self.pools.items()}

    def candidates(self, modes: Sequence[Mode]) -> Iterator[_Candidate]:
        has_media = bool(self._predictor.request.items)
        for mode in modes:
            needed = {Stage.PREFILL}
            if has_media and not mode.splits_encode:
                needed.add(Stage.ENCODE)
            if not mode.splits_decode:
                needed.add(Stage.DECODE)
            for prefill_pool, prefill_roles in self.roles.items():
                if not needed <= prefill_roles:
                    continue
                spare = len(prefill_roles) - len(needed)
                if not mode.splits_decode:
                    decode_pools = [prefill_pool]
                else:
                    decode_pools = [p for p, r in self.roles.items() if Stage.DECODE in r and p != prefill_pool]
                for decode_pool in decode_pools:
                    if mode.splits_decode:
                        spare_both = spare + len(self.roles[decode_pool]) - 1
                    else:
                        spare_both = spare
                    yield from self._over_replicas(mode, prefill_pool, decode_pool, spare_both)

    def _over_replicas(self, mode: Mode, prefill_pool: str, decode_pool: str, spare: int) -> Iterator[_Candidate]:
        plans: Sequence[tuple[EncodePlan | None, int]] = [(None, 0)]
        if mode.splits_encode and self._predictor.request.items:
            plans = self._encode_plans(frozenset({prefill_pool, decode_pool}))
        for plan, encode_spare in plans:
            for prefill in self._shortlist(prefill_pool, _CANDIDATES_PER_POOL):
                if prefill_pool == decode_pool:
                    yield _Candidate(mode, plan, prefill, prefill, spare + encode_spare)
                    continue
                for decode in self._shortlist(decode_pool, _CANDIDATES_PER_POOL):
                    yield _Candidate(mode, plan, prefill, decode, spare + encode_spare)

    def _encode_plans(self, used: frozenset[str]) -> list[tuple[EncodePlan, int]]:
        """Spread the items over the encode pools with the fewest roles, and, if there are others, over all of them.

        Each plan comes with the spare roles of its replicas.
        """
        eligible = tuple(pool for pool, roles in self.roles.items() if Stage.ENCODE in roles and pool not in used)
        if not eligible:
            return []
        fewest = min(len(self.roles[pool]) for pool in eligible)
        dedicated = tuple(pool for pool in eligible if len(self.roles[pool]) == fewest)
        return [self._encode_plan(pools) for pools in dict.fromkeys((dedicated, eligible))]

    def _encode_plan(self, pools: tuple[str, ...]) -> tuple[EncodePlan, int]:
        known = self._plans.get(pools)
        if known is None:
            limit = max(_CANDIDATES_PER_POOL, min(_MAX_ENCODERS, len(self._predictor.request.items)))
            plan = self._predictor.spread([worker for pool in pools for worker in self._shortlist(pool, limit)])
            used_workers = {worker.replica_id: worker for worker in plan.assigned}
            known = plan, sum(len(worker.load.roles) - 1 for worker in used_workers.values())
            self._plans[pools] = known
        return known

    def _shortlist(self, pool: str, limit: int) -> list[Worker]:
        """Return the least loaded replicas of a pool, best first, and those known to hold part of the request."""
        known = self._shortlists.get((pool, limit))
        if known is not None:
            return known
        members = self.pools[pool]
        request, affinity = self._predictor.request, self._predictor.affinity
        if len(members) > 1:
            key = request.items[0].mm_hash if request.items else request.request_id
            start = zlib.crc32(key.encode()) % len(members)
            members = members[start:] + members[:start]
        chosen = members
        if len(members) > limit:
            per_item_s, per_patch_s, per_token_s, per_decode_s = queue_weight_s(self._predictor.cost_model)
            chosen = heapq.nsmallest(
                limit,
                members,
                key=lambda load: (
                    load.num_queued_prefill_tokens * per_token_s
                    + load.num_queued_encode_patches * per_patch_s
                    + load.num_queued_encode_items * per_item_s
                    + load.num_running * per_decode_s
                ),
            )
            if affinity.embeddings or affinity.prefix_tokens:
                # Hints may name many replicas; the first few that apply are enough.
                hinted = [load for load in members if self._holds_part(load.replica_id) and load not in chosen]
                chosen = chosen + hinted[:limit]
        shortlist = [self._worker(load) for load in chosen]
        self._shortlists[pool, limit] = shortlist
        return shortlist

    def _holds_part(self, replica_id: str) -> bool:
        affinity = self._predictor.affinity
        if affinity.prefix_tokens.get(replica_id):
            return True
        held = affinity.embeddings.get(replica_id)
        return held is not None and any(item.mm_hash in held for item in self._predictor.request.items)

    def _worker(self, load: ReplicaLoad) -> Worker:
        worker = self._workers.get(load.replica_id)
        if worker is None:
            worker = self._workers[load.replica_id] = self._predictor.worker(load)
        return worker


def _modes_to_try(mode: Mode, pools: Mapping[str, frozenset[Stage]], *, has_media: bool) -> tuple[Mode, ...]:
    formable = formable_modes(pools)
    if mode is not Mode.AUTO:
        if mode not in formable:
            names = ", ".join(each.value for each in formable) or "none"
            raise UnsupportedModeError(
                f"mode {mode.value} cannot be formed by the configured pools; they can form: {names}", "epd.mode"
            )
        return (mode,)
    if not formable:
        raise UnsupportedModeError("no mode can be formed by the configured pools", "epd.mode")
    if has_media:
        return formable
    shapes: dict[bool, Mode] = {}
    for each in formable:
        shapes.setdefault(each.splits_decode, each)
    return tuple(shapes.values())


def _rank(figures: Figures, slo: SLO, spare_roles: int) -> tuple[float, ...]:
    """Return a candidate's sort key, smallest first.

    Coarse where noise must not outweigh the next criterion: attainment in hundredths, lateness in tenths of the SLO,
    work in microseconds.
    """
    ttft_s, itl_s, _, work_s, attainment = figures
    lateness = max(1.0, ttft_s / slo.ttft_s, itl_s / slo.itl_s)
    return (math.floor(0.5 - 100 * attainment), int(10 * lateness), int(1e6 * work_s), spare_roles, ttft_s, itl_s)


def _placement(request: Request, candidate: _Candidate, reason: str) -> Placement:
    if candidate.plan is not None:
        encode = tuple(worker.replica_id for worker in candidate.plan.assigned)
    else:
        encode = (candidate.prefill.replica_id,) * len(request.items)
    return Placement(candidate.mode, candidate.prefill.replica_id, candidate.decode.replica_id, encode, reason)


def _reason(chosen: Mode, asked: Mode, prediction: Prediction, slo: SLO, num_considered: int) -> str:
    def against(name: str, value_s: float, limit_s: float) -> str:
        return f"{name} {value_s:.3g} s {'within' if value_s <= limit_s else 'over'} {limit_s:.3g} s"

    what = f"{against('ttft', prediction.ttft_s, slo.ttft_s)}, {against('itl', prediction.itl_s, slo.itl_s)}"
    if prediction.stall_s > slo.itl_s:
        what += f", stalls others {prediction.stall_s:.3g} s"
    label = chosen.value if asked is Mode.AUTO else f"{chosen.value} (asked for)"
    if num_considered == 1:
        rank = "the only placement"
    else:
        rank = f"{'cheapest' if prediction.meets(slo) else 'best'} of {num_considered}"
    return f"{label}: predicted {what}, {rank}"


def _no_replica_left(mode: Mode, search: _Search, *, has_media: bool) -> StageFailedError:
    stages = [Stage.ENCODE, Stage.PREFILL, Stage.DECODE] if has_media else [Stage.PREFILL, Stage.DECODE]
    live = frozenset(role for roles in search.roles.values() for role in roles)
    missing = next((stage for stage in stages if stage not in live), None)
    if missing is not None:
        return StageFailedError(missing.value, "no live replica is left for this stage")
    return StageFailedError(
        stages[0].value, f"the live replicas cannot form mode {mode.value}; those of another pool are gone"
    )
