"""If these fail, contenders are compared on different work, or on work that is not what the report says."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from epd.bench.workload import (
    PIXELS_PER_IMAGE_TOKEN,
    RequestShape,
    WorkItem,
    arrival_times,
    builtin_shape,
    builtin_workload,
    draw_image,
    fixed_workload,
    image_size,
    read_servegen,
    request_body,
    scale_shape,
    servegen_workload,
)
from epd.errors import ConfigError

SHAPE = RequestShape(num_images=2, image_width=112, image_height=84, text_tokens=12, output_tokens=8)


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
def test_arrivals_have_the_rate_and_burstiness_asked_for(cv: float) -> None:
    times = np.array(arrival_times(10.0, 4000.0, cv, np.random.default_rng(1)))
    gaps = np.diff(times)
    assert len(times) / 4000 == pytest.approx(10.0, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)
    assert (gaps >= 0).all()
    assert times[-1] < 4000


def test_even_arrivals_are_even() -> None:
    assert arrival_times(2.0, 2.0, 0.0, np.random.default_rng(0)) == pytest.approx([0.5, 1.0, 1.5])
    with pytest.raises(ValueError, match="rate"):
        arrival_times(0.0, 1.0, 1.0, np.random.default_rng(0))


def test_the_same_seed_gives_the_same_workload_and_another_seed_another() -> None:
    first = fixed_workload([SHAPE], rate=5, duration_s=10, cv=1, seed=3, image_share=0.5, image_reuse=0.5)
    assert first == fixed_workload([SHAPE], rate=5, duration_s=10, cv=1, seed=3, image_share=0.5, image_reuse=0.5)
    assert first != fixed_workload([SHAPE], rate=5, duration_s=10, cv=1, seed=4, image_share=0.5, image_reuse=0.5)
    assert builtin_workload(rate=5, duration_s=10, seed=3) == builtin_workload(rate=5, duration_s=10, seed=3)


def test_image_share_and_reuse_are_the_shares_they_name() -> None:
    workload = fixed_workload([SHAPE], rate=100, duration_s=20, cv=1, seed=0, image_share=0.3, image_reuse=0.6)
    with_images = [item for item in workload.items if item.image_seeds]
    assert len(with_images) / len(workload.items) == pytest.approx(0.3, abs=0.04)
    seeds = [seed for item in with_images for seed in item.image_seeds]
    assert len(set(seeds)) / len(seeds) == pytest.approx(0.4, abs=0.05)
    fresh = fixed_workload([SHAPE], rate=100, duration_s=5, cv=1, seed=0)
    seeds = [seed for item in fresh.items for seed in item.image_seeds]
    assert len(set(seeds)) == len(seeds)


def test_the_built_in_distribution_has_the_quantiles_of_the_service_it_imitates() -> None:
    rng = np.random.default_rng(0)
    shapes = [builtin_shape(rng) for _ in range(6000)]
    images = np.array([shape.num_images for shape in shapes])
    text = np.array([shape.text_tokens for shape in shapes])
    output = np.array([shape.output_tokens for shape in shapes])
    tokens = np.array([shape.image_width * shape.image_height / PIXELS_PER_IMAGE_TOKEN for shape in shapes])
    assert [float(np.percentile(images, p)) for p in (50, 90, 99)] == [1, 3, 9]
    assert images.mean() == pytest.approx(1.6, abs=0.15)
    assert np.percentile(text, 50) == pytest.approx(106, rel=0.15)
    assert np.percentile(text, 90) == pytest.approx(1914, rel=0.05)
    assert np.percentile(output, 50) == pytest.approx(97, rel=0.1)
    assert np.percentile(output, 90) == pytest.approx(264, rel=0.1)
    assert tokens.mean() == pytest.approx(684, rel=0.1)


def test_scaling_a_shape_scales_tokens_and_pixels_alike() -> None:
    half = scale_shape(RequestShape(3, 400, 200, 100, 40), 0.25)
    assert half == RequestShape(3, 200, 100, 25, 10)


@pytest.mark.parametrize("num_tokens", [16, 256, 1200])
def test_an_image_size_is_worth_its_tokens(num_tokens: int) -> None:
    width, height = image_size(num_tokens, np.random.default_rng(0))
    assert width * height / PIXELS_PER_IMAGE_TOKEN == pytest.approx(num_tokens, rel=0.1)


def test_a_body_is_an_openai_request_with_decodable_images_of_the_right_size() -> None:
    item = WorkItem(7, 0.0, SHAPE, (1, 2))
    body = json.loads(request_body(item, model="demo", options={"epd": {"mode": "epd"}}))
    *images, text = body["messages"][0]["content"]
    assert (body["model"], body["max_tokens"], body["stream"], body["epd"]) == ("demo", 8, True, {"mode": "epd"})
    assert body["stream_options"] == {"include_usage": True}
    assert len(text["text"].split()) == 12
    for part in images:
        data = base64.b64decode(part["image_url"]["url"].removeprefix("data:image/jpeg;base64,"))
        assert Image.open(io.BytesIO(data)).size == (112, 84)
    assert images[0] != images[1]


def test_a_salt_changes_every_byte_that_a_cache_could_know_but_no_size() -> None:
    item = WorkItem(7, 0.0, SHAPE, (1, 2))
    assert request_body(item, model="m", salt=1) == request_body(item, model="m", salt=1)
    first, second = (json.loads(request_body(item, model="m", salt=salt)) for salt in (1, 2))
    pairs = zip(first["messages"][0]["content"], second["messages"][0]["content"], strict=True)
    for one, other in pairs:
        assert one != other
    assert draw_image(60, 60, 1) == draw_image(60, 60, 1) != draw_image(60, 60, 2)


# -- ServeGen


def write_population(directory: Path, index: int, rate: float, images: int) -> None:
    window = {"image_count": f"{{{images}: 1.0}}", "image_tokens": "{64: 0.5, 256: 0.5}"}
    window |= {"text_tokens": "{10: 1.0}", "output_tokens": "{20: 0.9, 30: 0.1}", "audio_count": "{0: 1.0}"}
    (directory / f"chunk-{index}-dataset.json").write_text(json.dumps({"0": window, "43200": window}))
    rows = [f"0,{rate},2.0,Gamma,0.25,4.0", "43200,0,0,,0,0"]
    (directory / f"chunk-{index}-trace.csv").write_text("\n".join(rows))


def test_a_population_is_replayed_with_its_mix_at_the_rate_asked_for(tmp_path: Path) -> None:
    write_population(tmp_path, 0, rate=0.3, images=1)
    write_population(tmp_path, 1, rate=0.1, images=3)
    clients = read_servegen(tmp_path)
    workload = servegen_workload(clients, rate=20.0, duration_s=400.0, seed=0, start_s=100.0)
    assert len(workload.items) / 400 == pytest.approx(20.0, rel=0.1)
    share = np.mean([item.shape.num_images == 3 for item in workload.items])
    assert share == pytest.approx(0.25, abs=0.06)
    assert {item.shape.output_tokens for item in workload.items} == {20, 30}
    assert [item.due_s for item in workload.items] == sorted(item.due_s for item in workload.items)
    assert workload == servegen_workload(clients, rate=20.0, duration_s=400.0, seed=0, start_s=100.0)


def test_a_time_of_day_without_traffic_is_an_error(tmp_path: Path) -> None:
    write_population(tmp_path, 0, rate=0.3, images=1)
    with pytest.raises(ConfigError, match="no client is active"):
        servegen_workload(read_servegen(tmp_path), rate=1.0, duration_s=1.0, seed=0, start_s=50_000.0)


@pytest.mark.parametrize("text", ["", "{}x", '{"0": {"image_count": "{1: 1.0}"}}', '{"0": {"image_count": "os.x()"}}'])
def test_a_file_in_another_format_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="holds no chunk"):
        read_servegen(tmp_path)
    write_population(tmp_path, 0, rate=0.3, images=1)
    (tmp_path / "chunk-0-dataset.json").write_text(text)
    with pytest.raises(ConfigError, match=r"chunk-0-dataset\.json: not a ServeGen population"):
        read_servegen(tmp_path)
