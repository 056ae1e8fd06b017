"""If these fail, requests land on replicas that are dead, cannot serve them, or miss an SLO that others would meet."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.config import formable_modes
from epd.errors import AdmissionRejectedError, StageFailedError, UnsupportedModeError
from epd.routing import AdmissionLimits, Affinity, CostModel, Decision, Dispatch, Prediction, admit, anticipate, decide
from epd.routing.cost_model import (
    CostSource,
    DecodeCost,
    DecodeRegime,
    EncodeCost,
    PrefillCost,
    PreprocessCost,
    ProfileKey,
    TransferCost,
)
from epd.routing.policy import place
from epd.types import (
    SLO,
    MediaItem,
    Modality,
    Mode,
    PlaceholderRange,
    Placement,
    ReplicaLoad,
    Request,
    SamplingParams,
    Stage,
)

E, P, D = Stage.ENCODE, Stage.PREFILL, Stage.DECODE
QUICKSTART = {"encode": {E}, "prefill": {E, P}, "decode": {E, P, D}}
REGIME = DecodeRegime(0.010, 1e-7, 1e-4)
COSTS = CostModel(
    key=ProfileKey("m", "cpu", "float32", "0"),
    source=CostSource.PROFILE,
    preprocess=PreprocessCost(0.001, 1e-6),
    encode=EncodeCost(0.005, 1e-4, 0.0),
    prefill=PrefillCost(0.005, 2e-4, 0.0),
    decode=DecodeCost(REGIME, REGIME, 64),
    embedding_transfer=TransferCost(0.002, 1e-9),
    kv_transfer=TransferCost(0.002, 1e-9),
    embedding_bytes_per_token=1024.0,
    kv_bytes_per_token=6144.0,
)
SLO_1S = SLO(1.0, 0.05)


def replica(replica_id: str, pool: str, roles: set[Stage], **counts: int) -> ReplicaLoad:
    blocks = {"block_size": 16, "num_blocks": 1000, "num_free_blocks": 900}
    return ReplicaLoad(replica_id, pool, frozenset(roles), **blocks, **counts)


def quickstart(num_each: int = 1, **busy: dict[str, int]) -> list[ReplicaLoad]:
    """Replicas named pool0, pool1, ...; keyword arguments give the counts of single replicas."""
    return [
        replica(f"{pool}{i}", pool, roles, **busy.get(f"{pool}{i}", {}))
        for pool, roles in QUICKSTART.items()
        for i in range(num_each)
    ]


def request(num_images: int = 0, num_text: int = 100, patches: int = 1024, request_id: str = "r") -> Request:
    tokens = patches // 4
    items = tuple(
        MediaItem(i, Modality.IMAGE, f"hash{i}", PlaceholderRange(i * tokens, tokens), (1, patches // 16, 16))
        for i in range(num_images)
    )
    return Request(request_id, tuple(range(num_text + num_images * tokens)), SamplingParams(max_tokens=64), items)


def choose(wanted: Request, loads: list[ReplicaLoad], mode: Mode = Mode.AUTO, slo: SLO = SLO_1S, **more) -> Decision:  # type: ignore[no-untyped-def]
    return decide(wanted, loads, mode=mode, slo=slo, cost_model=COSTS, **more)


# -- fixed modes


@pytest.mark.parametrize(
    ("mode", "num_images", "encode", "prefill", "decode"),
    [
        (Mode.AGGREGATED, 1, ("decode0",), "decode0", "decode0"),
        (Mode.E_PD, 1, ("encode0",), "decode0", "decode0"),
        (Mode.EP_D, 1, ("prefill0",), "prefill0", "decode0"),
        (Mode.EPD, 1, ("encode0",), "prefill0", "decode0"),
        (Mode.AGGREGATED, 0, (), "decode0", "decode0"),
        (Mode.E_PD, 0, (), "decode0", "decode0"),
        (Mode.EP_D, 0, (), "prefill0", "decode0"),
        (Mode.EPD, 0, (), "prefill0", "decode0"),
        (Mode.E_PD, 2, ("encode0", "encode0"), "decode0", "decode0"),
    ],
)
def test_a_fixed_mode_uses_the_most_dedicated_replicas_that_form_it(
    mode: Mode, num_images: int, encode: tuple[str, ...], prefill: str, decode: str
) -> None:
    placement = choose(request(num_images), quickstart(), mode).placement
    assert (placement.mode, placement.encode, placement.prefill, placement.decode) == (mode, encode, prefill, decode)


@pytest.mark.parametrize("mode", [Mode.AGGREGATED, Mode.E_PD, Mode.EP_D, Mode.EPD])
def test_a_fixed_mode_takes_the_least_loaded_replica_of_each_pool(mode: Mode) -> None:
    busy = {"num_waiting": 2, "num_queued_prefill_tokens": 800, "num_queued_encode_items": 2}
    loads = quickstart(2, encode0=busy, prefill0=busy, decode0={**busy, "num_running": 8, "num_context_tokens": 4000})
    placement = choose(request(1), loads, mode).placement
    assert {*placement.encode, placement.prefill, placement.decode} <= {"encode1", "prefill1", "decode1"}


def test_items_are_spread_longest_first_by_predicted_finish_time() -> None:
    loads = [*quickstart(), replica("encode1", "encode", {E}), replica("encode2", "encode", {E})]
    sizes = (256, 4096, 256, 2048)
    items = tuple(
        MediaItem(i, Modality.IMAGE, f"h{i}", PlaceholderRange(0, size // 4), (1, size // 16, 16))
        for i, size in enumerate(sizes)
    )
    wanted = Request("r", tuple(range(2000)), SamplingParams(max_tokens=8), items)
    encode = choose(wanted, loads, Mode.EPD).placement.encode
    assert encode[1] not in (encode[0], encode[2], encode[3])
    assert encode[0] == encode[2] != encode[3]


def test_a_slow_queue_is_avoided_even_if_it_holds_fewer_items() -> None:
    loads = [
        replica("few-but-huge", "encode", {E}, num_queued_encode_items=1, num_queued_encode_patches=16_000),
        replica("many-but-tiny", "encode", {E}, num_queued_encode_items=4, num_queued_encode_patches=256),
        replica("pd", "pd", {P, D}),
    ]
    assert choose(request(1), loads, Mode.E_PD).placement.encode == ("many-but-tiny",)


def test_an_item_goes_to_the_encoder_that_already_holds_its_embedding() -> None:
    loads = quickstart(4, encode2={"num_queued_encode_items": 1, "num_queued_encode_patches": 1024})
    affinity = Affinity(embeddings={"encode2": frozenset({"hash0"})})
    assert choose(request(1), loads, Mode.EPD, affinity=affinity).placement.encode == ("encode2",)


def test_a_known_prefix_draws_the_prompt_to_its_replica() -> None:
    affinity = Affinity(prefix_tokens={"prefill3": 900})
    loads = quickstart(8)
    assert choose(request(0, num_text=1000), loads, Mode.EP_D, affinity=affinity).placement.prefill == "prefill3"


def test_a_repeated_image_meets_the_same_idle_encoder() -> None:
    first = choose(request(1, request_id="a"), quickstart(8), Mode.EPD).placement
    second = choose(request(1, request_id="b"), quickstart(8), Mode.EPD).placement
    assert first.encode == second.encode


def test_equal_replicas_share_requests() -> None:
    used = {choose(request(request_id=f"r{i}"), quickstart(4), Mode.EP_D).placement.prefill for i in range(40)}
    assert len(used) == 4


# -- auto


def test_an_idle_system_runs_light_media_together() -> None:
    decision = choose(request(1), quickstart())
    assert decision.placement.mode is Mode.AGGREGATED
    assert decision.placement.reason.startswith("aggregated: predicted ttft 0.")
    assert decision.placement.reason.endswith(f"cheapest of {decision.num_considered}")


def test_running_decodes_with_a_tight_itl_push_prefill_elsewhere() -> None:
    loads = quickstart(decode0={"num_running": 6, "num_context_tokens": 3000})
    placement = choose(request(1), loads, slo=SLO(5.0, 0.05)).placement
    assert placement.mode in (Mode.EP_D, Mode.EPD)
    assert placement.prefill == "prefill0"
    assert placement.decode == "decode0"


def test_running_decodes_with_a_loose_itl_do_not() -> None:
    loads = quickstart(decode0={"num_running": 6, "num_context_tokens": 3000})
    assert choose(request(1), loads, slo=SLO(1.0, 2.0)).placement.prefill in ("decode0", "prefill0")
    assert choose(request(1), loads, slo=SLO(1.0, 2.0)).prediction.stall_s <= 2.0


def test_many_images_are_encoded_side_by_side_when_one_replica_would_be_late() -> None:
    loads = [*quickstart(), *(replica(f"encode{i}", "encode", {E}) for i in range(1, 5))]
    placement = choose(request(4, patches=4096), loads, slo=SLO(2.0, 0.5)).placement
    assert placement.mode.splits_encode
    assert len(set(placement.encode)) == 4


def test_a_backlog_at_the_all_round_worker_sends_requests_around_it() -> None:
    loads = quickstart(decode0={"num_waiting": 10, "num_queued_prefill_tokens": 20_000})
    assert choose(request(1), loads, slo=SLO(1.0, 10.0)).placement.prefill == "prefill0"


def test_when_nothing_meets_the_slo_the_least_late_placement_wins() -> None:
    waiting = {"num_waiting": 50, "num_queued_prefill_tokens": 100_000}
    longer = {"num_waiting": 100, "num_queued_prefill_tokens": 200_000}
    loads = [replica("a0", "a", {E, P, D}, **longer), replica("a1", "a", {E, P, D}, **waiting)]
    decision = choose(request(1), loads)
    assert decision.placement.prefill == "a1"
    assert "over 1 s, " in decision.placement.reason
    assert not decision.prediction.meets(SLO_1S)


def test_a_short_block_pool_repels_decodes() -> None:
    full = ReplicaLoad("d0", "d", frozenset({D}), num_running=20, num_blocks=100, num_free_blocks=0, block_size=16)
    free = ReplicaLoad("d1", "d", frozenset({D}), num_running=20, num_blocks=100, num_free_blocks=90, block_size=16)
    loads = [replica("p", "p", {E, P}), full, free]
    assert choose(request(request_id="x"), loads).placement.decode == "d1"
    assert choose(request(request_id="y"), loads).placement.decode == "d1"


def test_auto_names_a_text_request_by_the_first_formable_mode_of_its_shape() -> None:
    loads = [replica("e", "e", {E}), replica("pd", "pd", {P, D})]
    decision = choose(request(), loads)
    assert (decision.placement.mode, decision.num_considered) == (Mode.E_PD, 1)
    assert decision.placement.reason.endswith("the only placement")


def test_pruning_a_large_cluster_keeps_its_only_idle_replica() -> None:
    busy = {"num_waiting": 5, "num_queued_prefill_tokens": 5000, "num_running": 9, "num_context_tokens": 9000}
    loads = [replica(f"a{i}", "a", {E, P, D}, **({} if i == 613 else busy)) for i in range(1000)]
    decision = choose(request(1), loads)
    assert decision.placement.prefill == "a613"
    assert decision.num_considered <= 4


def test_several_choices_weigh_as_several_decodes() -> None:
    def with_choices(n: int) -> Request:
        return Request("r", tuple(range(100)), SamplingParams(max_tokens=64, n=n))

    one, eight = (choose(with_choices(n), quickstart(), Mode.EP_D).prediction for n in (1, 8))
    assert eight.itl_s > one.itl_s
    assert eight.work_s > one.work_s
    assert eight.ttft_s == one.ttft_s


def test_a_resumed_request_is_placed_by_all_the_tokens_it_must_prefill_again() -> None:
    fresh = request(0, num_text=100)
    resumed = fresh.resume_choice(0, range(60))
    assert choose(resumed, quickstart()).prediction.ttft_s > choose(fresh, quickstart()).prediction.ttft_s


# -- what is not possible


def test_a_mode_that_the_pools_cannot_form_is_refused_with_those_they_can() -> None:
    loads = [replica("e", "e", {E}), replica("pd", "pd", {P, D})]
    with pytest.raises(UnsupportedModeError, match=r"mode epd cannot be formed .* they can form: e_pd") as caught:
        choose(request(1), loads, Mode.EPD)
    assert caught.value.param == "epd.mode"
    with pytest.raises(UnsupportedModeError):
        choose(request(1), [replica("e", "e", {E})])


@pytest.mark.parametrize(
    ("mode", "excluded", "num_images", "stage"),
    [
        (Mode.EPD, {"encode0", "prefill0", "decode0"}, 1, "encode"),
        (Mode.EPD, {"decode0"}, 1, "decode"),
        (Mode.EPD, {"encode0"}, 1, "encode"),
        (Mode.EP_D, {"prefill0"}, 0, "prefill"),
        (Mode.AUTO, {"decode0"}, 0, "decode"),
    ],
)
def test_a_formable_mode_without_live_replicas_is_a_failed_stage(
    mode: Mode, excluded: set[str], num_images: int, stage: str
) -> None:
    with pytest.raises(StageFailedError) as caught:
        choose(request(num_images), quickstart(), mode, excluded=frozenset(excluded))
    assert caught.value.stage == stage


def test_a_configured_pool_that_is_gone_fails_the_stage_not_the_mode() -> None:
    pools = {name: frozenset(roles) for name, roles in QUICKSTART.items()}
    loads = [load for load in quickstart() if load.pool != "prefill"]
    with pytest.raises(StageFailedError):
        choose(request(1), loads, Mode.EPD, pools=pools)
    assert choose(request(1), loads, pools=pools).placement.decode == "decode0"


# -- properties

ROLE_SETS = st.sets(st.sampled_from([E, P, D]), min_size=1)
COUNTS = st.integers(0, 40)


@st.composite
def clusters(draw: st.DrawFn) -> list[ReplicaLoad]:
    loads = []
    for pool, roles in enumerate(draw(st.lists(ROLE_SETS, min_size=1, max_size=4))):
        for index in range(draw(st.integers(1, 4))):
            loads.append(
                ReplicaLoad(
                    f"{pool}-{index}",
                    f"pool{pool}",
                    frozenset(roles),
                    num_waiting=draw(COUNTS),
                    num_running=draw(COUNTS),
                    num_queued_prefill_tokens=100 * draw(COUNTS),
                    num_queued_encode_items=draw(st.integers(0, 3)),
                    num_queued_encode_patches=100 * draw(COUNTS),
                    num_context_tokens=100 * draw(COUNTS),
                    num_blocks=100,
                    num_free_blocks=draw(st.integers(0, 100)),
                    block_size=16,
                )
            )
    return loads


def check_placement(placement: Placement, wanted: Request, loads: list[ReplicaLoad], excluded: frozenset[str]) -> None:
    by_id = {load.replica_id: load for load in loads}
    prefill, decode = by_id[placement.prefill], by_id[placement.decode]
    assert P in prefill.roles
    assert D in decode.roles
    assert len(placement.encode) == len(wanted.items)
    assert (prefill.pool != decode.pool) == placement.mode.splits_decode
    assert placement.mode.splits_decode or prefill is decode
    for name in placement.encode:
        assert E in by_id[name].roles
        if placement.mode.splits_encode:
            assert by_id[name].pool not in (prefill.pool, decode.pool)
        else:
            assert name == placement.prefill
    assert not {placement.prefill, placement.decode, *placement.encode} & excluded
    assert placement.mode is not Mode.AUTO
    assert placement.reason


@settings(deadline=None)
@given(clusters(), st.integers(0, 5), st.sampled_from(list(Mode)), st.sets(st.integers(0, 3)), st.integers(0, 3))
def test_a_placement_is_feasible_never_excluded_and_repeatable(
    loads: list[ReplicaLoad], num_images: int, mode: Mode, dead: set[int], held: int
) -> None:
    excluded = frozenset(f"{pool}-{index}" for pool in dead for index in range(2))
    wanted = request(num_images)
    affinity = Affinity({f"{held}-3": frozenset({"hash0"})}, {f"{held}-2": 50})
    formable = formable_modes({load.pool: load.roles for load in loads})
    arguments = {"mode": mode, "slo": SLO_1S, "cost_model": COSTS, "excluded": excluded, "affinity": affinity}
    try:
        placement = place(wanted, loads, **arguments)  # type: ignore[arg-type]
    except UnsupportedModeError:
        assert mode not in formable
        assert mode is not Mode.AUTO or not formable
        return
    except StageFailedError:
        assert excluded & {load.replica_id for load in loads}
        return
    check_placement(placement, wanted, loads, excluded)
    assert placement.mode in formable
    assert mode in (Mode.AUTO, placement.mode)
    assert place(wanted, loads, **arguments) == placement  # type: ignore[arg-type]


@settings(deadline=None)
@given(clusters())
def test_auto_is_never_expected_to_do_worse_than_a_fixed_mode(loads: list[ReplicaLoad]) -> None:
    formable = formable_modes({load.pool: load.roles for load in loads})
    if formable:
        best = choose(request(2), loads).prediction.attainment
        for mode in formable:
            assert best >= choose(request(2), loads, mode).prediction.attainment - 0.011


# -- what was just sent


def test_a_burst_between_two_reports_does_not_pile_onto_one_replica() -> None:
    loads = quickstart(3)
    dispatches: list[Dispatch] = []
    for index in range(6):
        wanted = request(1, request_id=f"r{index}")
        placement = choose(wanted, anticipate(loads, dispatches), Mode.EPD).placement
        dispatches.append(Dispatch(wanted, placement, sent_at_s=1.0))
    for stage in ("prefill", "decode"):
        used = [getattr(dispatch.placement, stage) for dispatch in dispatches]
        assert sorted(used.count(name) for name in set(used)) == [2, 2, 2]


def test_what_a_report_already_covers_is_not_counted_twice() -> None:
    wanted = request(1)
    placement = choose(wanted, quickstart()).placement
    loads = quickstart()
    assert anticipate(loads, [Dispatch(wanted, placement, sent_at_s=-1.0)]) == loads
    later = anticipate(loads, [Dispatch(wanted, placement, sent_at_s=1.0)])
    changed = next(load for load in later if load.replica_id == placement.prefill)
    assert (changed.num_waiting, changed.num_queued_prefill_tokens) == (1, wanted.num_prefill_tokens)
    assert (changed.num_queued_encode_items, changed.num_queued_encode_patches) == (1, 1024)


def test_a_decode_counts_until_a_report_can_know_of_it() -> None:
    """The decode replica hears of a request only after its prefill: its reports until then say nothing."""
    wanted = request(1)
    placement = choose(wanted, quickstart(), Mode.EPD).placement
    report = [replace(load, reported_at_s=5.0) for load in quickstart()]

    def running_decodes(first_token_at_s: float | None) -> int:
        loads = anticipate(report, [Dispatch(wanted, placement, 1.0, first_token_at_s)])
        return next(load for load in loads if load.replica_id == placement.decode).num_running

    assert running_decodes(None) == 1
    assert running_decodes(6.0) == 1
    assert running_decodes(4.0) == 0


# -- admission


def prediction(**changes: float | bool) -> Prediction:
    values = {"ttft_s": 0.5, "itl_s": 0.02, "stall_s": 0.0, "work_s": 0.1, "attainment": 1.0}
    return Prediction(**{**values, "is_idle": False, "is_calibrated": True, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "num_queued", "limits", "reason"),
    [
        ({}, 0, AdmissionLimits(10), None),
        ({"ttft_s": 3.5}, 0, AdmissionLimits(10), "ttft"),
        ({"itl_s": 0.2}, 0, AdmissionLimits(10), "itl"),
        ({"ttft_s": 3.5}, 0, AdmissionLimits(10, rejects_slo_misses=False), None),
        ({"ttft_s": 3.5, "is_idle": True}, 0, AdmissionLimits(10), None),
        ({"ttft_s": 3.5, "is_calibrated": False}, 0, AdmissionLimits(10), None),
        ({}, 10, AdmissionLimits(10), "queue_full"),
        ({"is_idle": True}, 10, AdmissionLimits(10, rejects_slo_misses=False), "queue_full"),
    ],
)
def test_admission_rejects_for_the_right_reason(
    changes: dict[str, float | bool], num_queued: int, limits: AdmissionLimits, reason: str | None
) -> None:
    if reason is None:
        admit(prediction(**changes), SLO_1S, limits, num_queued_requests=num_queued)
        return
    with pytest.raises(AdmissionRejectedError) as caught:
        admit(prediction(**changes), SLO_1S, limits, num_queued_requests=num_queued)
    assert caught.value.reason == reason
    assert 1.0 <= caught.value.retry_after_s <= 30.0


def test_a_rejected_request_is_told_to_wait_for_the_excess() -> None:
    with pytest.raises(AdmissionRejectedError) as caught:
        admit(prediction(ttft_s=8.0), SLO_1S, AdmissionLimits(10), num_queued_requests=0)
    assert caught.value.retry_after_s == pytest.approx(7.0)


def test_an_idle_system_admits_even_what_it_expects_to_be_late() -> None:
    decision = choose(request(8, patches=16_384), quickstart())
    assert decision.prediction.ttft_s > SLO_1S.ttft_s
    admit(decision.prediction, SLO_1S, AdmissionLimits(10), num_queued_requests=0)
