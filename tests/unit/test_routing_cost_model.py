"""If these fail, the router predicts wrong times or misreads a profile: requests go where they miss their SLO."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.errors import ConfigError
from epd.routing.correction import MIN_OBSERVATIONS, Correction, correct, observe, predicted_stage_s
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
from epd.routing.priors import guess_device, priors_from_shapes, shapes_from_config
from epd.types import (
    MediaItem,
    Modality,
    Mode,
    PlaceholderRange,
    Placement,
    Request,
    SamplingParams,
    StageReport,
)

QWEN2_5_VL_7B = {
    "text_config": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    },
    "vision_config": {
        "hidden_size": 1280,
        "depth": 32,
        "intermediate_size": 3420,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}


def make_model(source: CostSource = CostSource.PROFILE) -> CostModel:
    return CostModel(
        key=ProfileKey("m", "cpu", "float32", "0.1.0"),
        source=source,
        preprocess=PreprocessCost(fixed_s=0.002, per_patch_s=1e-5, num_workers=2),
        encode=EncodeCost(fixed_s=0.01, per_patch_s=1e-4, per_patch_squared_s=1e-8),
        prefill=PrefillCost(fixed_s=0.005, per_token_s=1e-4, per_token_squared_s=1e-8),
        decode=DecodeCost(DecodeRegime(0.02, 1e-6, 1e-4), DecodeRegime(0.01, 1e-6, 3e-4), large_from_sequences=32),
        embedding_transfer=TransferCost(0.003, 1e-9),
        kv_transfer=TransferCost(0.004, 1e-9),
        embedding_bytes_per_token=1000.0,
        kv_bytes_per_token=10_000.0,
        hold_out_error={"encode": 0.04},
    )


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [
        (make_model().encode_s([100, 200]), 0.01 + 1e-4 * 300 + 1e-8 * 50_000),
        (make_model().encode_s([]), 0.0),
        (make_model().preprocess_s([100]), 0.002 + 0.001),
        (make_model().preprocess_s([100, 100]), (2 * 0.002 + 0.002) / 2),
        (make_model().prefill_s(100), 0.005 + 0.01 + 1e-4),
        (make_model().prefill_s(100, 60), 0.005 + 1e-4 * 40 + 1e-8 * (100**2 - 60**2)),
        (make_model().prefill_s(100, 100), 0.0),
        (make_model().decode_step_s(4, 1000), 0.02 + 0.001 + 4e-4),
        (make_model().decode_step_s(32, 1000), 0.01 + 0.001 + 32 * 3e-4),
        (make_model().embedding_transfer_s(100), 0.003 + 1e-4),
        (make_model().kv_transfer_s(100), 0.004 + 1e-3),
    ],
)
def test_each_stage_follows_its_cost_form(predicted: float, expected: float) -> None:
    assert predicted == pytest.approx(expected)


def test_a_profile_survives_writing_and_reading() -> None:
    model = make_model()
    assert CostModel.from_json(model.to_json()) == model


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda data: data.pop("encode"), "args.router.profile.encode"),
        (lambda data: data["encode"].update(fixed_s=-1), "args.router.profile.encode.fixed_s"),
        (lambda data: data["encode"].update(fixed_s="fast"), "args.router.profile.encode.fixed_s"),
        (lambda data: data["encode"].update(fixed_s=True), "args.router.profile.encode.fixed_s"),
        (lambda data: data["decode"]["large"].update(extra=1), "args.router.profile.decode.large.extra"),
        (lambda data: data["preprocess"].update(num_workers=0), "args.router.profile.preprocess.num_workers"),
        (lambda data: data.update(source="dream"), "args.router.profile.source"),
        (lambda data: data.update(key=3), "args.router.profile.key"),
        (lambda data: data["key"].update(model=3), "args.router.profile.key.model"),
        (lambda data: data.update(hold_out_error=[]), "args.router.profile.hold_out_error"),
        (lambda data: data.update(schema_version=99), "args.router.profile"),
    ],
)
def test_a_wrong_profile_is_refused_by_the_path_of_its_fault(change, path) -> None:  # type: ignore[no-untyped-def]
    data = json.loads(make_model().to_json())
    change(data)
    with pytest.raises(ConfigError) as caught:
        CostModel.from_json(json.dumps(data))
    assert caught.value.path == path


@pytest.mark.parametrize("text", ["", "[]", "{", "3", '{"schema_version": 1}', '{"encode": NaN}'])
def test_text_that_is_no_profile_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        CostModel.from_json(text)


def test_scaling_a_stage_multiplies_its_times_and_nothing_else() -> None:
    model = make_model()
    scaled = model.scaled({CostStage.ENCODE: 2.0, CostStage.DECODE: 0.5, CostStage.PREPROCESS: 3.0})
    assert scaled.encode_s([100]) == pytest.approx(2 * model.encode_s([100]))
    assert scaled.decode_step_s(4, 100) == pytest.approx(0.5 * model.decode_step_s(4, 100))
    assert scaled.decode_step_s(64, 100) == pytest.approx(0.5 * model.decode_step_s(64, 100))
    assert scaled.preprocess_s([100]) == pytest.approx(3 * model.preprocess_s([100]))
    assert scaled.preprocess.num_workers == model.preprocess.num_workers
    assert scaled.prefill == model.prefill
    assert scaled.kv_bytes_per_token == model.kv_bytes_per_token


# -- priors


def test_priors_know_the_published_kv_bytes_of_qwen2_5_vl_7b() -> None:
    shapes = shapes_from_config(QWEN2_5_VL_7B, "bfloat16")
    assert shapes.kv_bytes_per_token == 57_344
    assert shapes.embedding_bytes_per_token == 3584 * 2
    assert shapes.num_language_params == pytest.approx(7.1e9, rel=0.1)
    assert shapes.num_vision_params == pytest.approx(0.63e9, rel=0.15)


def test_priors_of_an_8b_model_are_of_the_measured_order_on_a_gpu() -> None:
    """Qwen3-VL-8B on H200 was measured at about 0.026 ms a prompt token; 7B should be within a factor of two."""
    key = ProfileKey("qwen", "cuda", "bfloat16", "0")
    model = priors_from_shapes(key, shapes_from_config(QWEN2_5_VL_7B, "bfloat16"), guess_device("cuda", "bfloat16"))
    per_token_s = (model.prefill_s(2000) - model.prefill.fixed_s) / 2000
    assert 0.013e-3 < per_token_s < 0.052e-3
    assert not model.is_calibrated
    assert CostModel.from_json(model.to_json()) == model


def test_a_mixture_of_experts_costs_only_the_experts_it_uses() -> None:
    text = dict(QWEN2_5_VL_7B["text_config"])
    sparse = {"text_config": {**text, "num_experts_per_tok": 2, "moe_intermediate_size": 768}}
    dense = shapes_from_config({"text_config": text}, "bfloat16").num_language_params
    assert shapes_from_config(sparse, "bfloat16").num_language_params < dense / 2


@settings(deadline=None)
@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_priors_never_predict_that_more_work_takes_less_time(a: int, b: int) -> None:
    shapes = shapes_from_config(QWEN2_5_VL_7B, "float32")
    model = priors_from_shapes(ProfileKey("m", "cpu", "float32", "0"), shapes, guess_device("cpu", "float32", 2))
    low, high = sorted((a, b))
    assert 0 < model.encode_s([low]) <= model.encode_s([high])
    assert 0 < model.prefill_s(low) <= model.prefill_s(high)
    assert 0 < model.decode_step_s(1, low) <= model.decode_step_s(1, high)
    assert 0 < model.kv_transfer_s(low) <= model.kv_transfer_s(high)


# -- fit


def test_a_fit_recovers_the_parameters_that_made_the_samples() -> None:
    true = (0.005, 1e-4, 2e-8)
    sizes = range(10, 2000, 35)
    samples = [Sample((1, n, n * n), true[0] + true[1] * n + true[2] * n * n) for n in sizes]
    result = fit(samples)
    assert result.parameters == pytest.approx(true, rel=1e-6)
    assert result.hold_out_error < 1e-6
    assert result.num_samples == len(samples)


def test_a_fit_is_never_negative_and_shrugs_off_a_disturbed_tenth() -> None:
    samples = [Sample((1, n, n * n), 1e-3 * n * (10 if n % 130 == 0 else 1)) for n in range(10, 700, 10)]
    result = fit(samples)
    assert min(result.parameters) >= 0
    assert result.parameters[1] == pytest.approx(1e-3, rel=0.05)


def test_a_fit_refuses_fewer_samples_than_parameters() -> None:
    with pytest.raises(ValueError, match="2 usable samples cannot determine 3 parameters"):
        fit([Sample((1, 2, 3), 0.1), Sample((1, 3, 9), 0.1), Sample((1, 4, 16), 0.0)])
    with pytest.raises(ValueError, match="0 usable samples"):
        fit([])


# -- correction


def test_a_correction_converges_on_a_constant_ratio_and_its_error_falls_to_zero() -> None:
    correction = Correction()
    for _ in range(60):
        correction = correction.update(0.1, 0.3)
    assert correction.ratio == pytest.approx(3.0)
    assert correction.error == pytest.approx(0.0, abs=0.01)


def test_the_first_observation_sets_the_scale_of_priors_that_are_far_off() -> None:
    assert Correction().update(0.001, 0.1).ratio == pytest.approx(100)


def test_one_outlier_hardly_moves_a_settled_correction() -> None:
    correction = Correction()
    for _ in range(50):
        correction = correction.update(0.1, 0.1)
    assert correction.update(0.1, 50.0).ratio < 1.2


@pytest.mark.parametrize(("predicted", "actual"), [(0, 1), (1, 0), (-1, 1), (math.inf, 1), (1, math.nan)])
def test_impossible_times_teach_nothing(predicted: float, actual: float) -> None:
    assert Correction(2.0, 0.1, 5).update(predicted, actual) == Correction(2.0, 0.1, 5)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9)), max_size=30))
def test_a_correction_stays_positive_and_finite_whatever_it_sees(observations: list[tuple[float, float]]) -> None:
    correction = Correction()
    for predicted, actual in observations:
        correction = correction.update(predicted, actual)
    assert 0 < correction.ratio < math.inf
    assert 0 <= correction.error < math.inf


def make_request() -> Request:
    items = tuple(MediaItem(i, Modality.IMAGE, f"hash{i}", PlaceholderRange(i * 25, 25), (1, 10, 10)) for i in range(2))
    return Request("r", tuple(range(80)), SamplingParams(max_tokens=11), items)


def test_a_report_corrects_the_stages_that_its_request_ran() -> None:
    model, request = make_model(CostSource.PRIORS), make_request()
    placement = Placement(Mode.EPD, "p", "d", ("e", "e"))
    predicted = predicted_stage_s(model, request, placement)
    assert set(predicted) == set(CostStage) - {CostStage.DECODE}
    timings = {stage.value: 2 * seconds for stage, seconds in predicted.items()} | {"decode": 10 * 0.06}
    corrections: dict[CostStage, Correction] = {}
    for _ in range(MIN_OBSERVATIONS):
        report = StageReport(timings_s=timings)
        corrections = observe(
            corrections, model, request, placement, report, predicted_step_s=0.02, num_output_tokens=11
        )
    assert {stage: round(each.ratio, 6) for stage, each in corrections.items()} == {
        **dict.fromkeys(predicted, 2.0),
        CostStage.DECODE: 3.0,
    }
    corrected = correct(model, corrections)
    assert corrected.source is CostSource.OBSERVED
    assert corrected.prefill_s(80) == pytest.approx(2 * model.prefill_s(80))


def test_items_answered_by_a_cache_do_not_make_encode_look_free() -> None:
    report = StageReport(timings_s={"encode": 1e-6, "preprocess": 1e-6, "prefill": 0.1}, cached={"embedding_items": 2})
    placement = Placement(Mode.AGGREGATED, "a", "a", ("a", "a"))
    corrections = observe({}, make_model(), make_request(), placement, report, predicted_step_s=0, num_output_tokens=1)
    assert set(corrections) == {CostStage.PREFILL}


def test_the_wait_for_an_encode_in_the_same_replica_does_not_make_prefill_look_slow() -> None:
    model, request = make_model(), make_request()
    timings = {"preprocess": 0.01, "encode_queue": 0.5, "encode": 0.2}
    timings["prefill"] = sum(timings.values()) + 3 * model.prefill_s(80)
    placement = Placement(Mode.AGGREGATED, "a", "a", ("a", "a"))
    report = StageReport(timings_s=timings)
    corrections = observe({}, model, request, placement, report, predicted_step_s=0, num_output_tokens=1)
    assert corrections[CostStage.PREFILL].ratio == pytest.approx(3.0)


def test_priors_stay_uncalibrated_until_prefill_and_decode_were_seen() -> None:
    model = make_model(CostSource.PRIORS)
    seen = Correction(1.0, 0.0, MIN_OBSERVATIONS)
    assert correct(model, {CostStage.PREFILL: seen}).source is CostSource.PRIORS
    assert correct(model, {CostStage.PREFILL: seen, CostStage.DECODE: seen}).source is CostSource.OBSERVED
    assert correct(dataclasses.replace(model, source=CostSource.PROFILE), {}).source is CostSource.PROFILE
