"""What an ingress knows of a prompt before any pixel is decoded: sizes, placeholders and rotary positions.

If these fail, prompts are laid out for other embeddings than the encoder makes (requests fail or answer nonsense), or
the language model sees images and clips at the wrong positions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoders import resolve_family
from encoders.checkpoint import read_json
from encoders.qwen2_5_vl.family import LOW_DETAIL_TOKENS, PromptConfig
from encoders.qwen2_5_vl.processor import ProcessorSettings
from epd.config import ModelConfig
from epd.errors import ConfigError, InvalidRequestError
from epd.types import MediaItem, MediaLayout, Modality, PlaceholderRange, Request, SamplingParams
from tests.tiny_checkpoints import make_tiny_qwen2_5_vl

SIDES = st.integers(min_value=1, max_value=3000)


@pytest.fixture(scope="module")
def family(tiny_qwen_dir: Path) -> Any:
    return resolve_family(ModelConfig(source=str(tiny_qwen_dir)))


@pytest.fixture(scope="module")
def token_id_of(tiny_qwen_dir: Path) -> dict[Modality, int]:
    config = PromptConfig.parse(read_json(tiny_qwen_dir / "config.json"))
    return {Modality.IMAGE: config.image_token_id, Modality.VIDEO: config.video_token_id}


@pytest.fixture(scope="module")
def reference(tiny_qwen_dir: Path) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(tiny_qwen_dir)


# --- images -----------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(width=SIDES, height=SIDES)
def test_an_image_has_as_many_patches_as_the_reference(family: Any, reference: Any, width: int, height: int) -> None:
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(InvalidRequestError, match="too long and thin"):
            family.image_layout(width, height)
        return
    layout = family.image_layout(width, height)
    assert int(np.prod(layout.grid_thw)) == reference.get_number_of_image_patches(height, width)
    assert layout.num_tokens * 4 == int(np.prod(layout.grid_thw))


@pytest.mark.parametrize("size", [(56, 56), (57, 300), (448, 448), (30, 1000), (1, 200), (640, 480), (5, 3)])
def test_the_grid_of_an_image_is_the_processors(family: Any, reference: Any, size: tuple[int, int]) -> None:
    from PIL import Image

    grid = reference(Image.new("RGB", size), return_tensors="np")["image_grid_thw"][0]
    assert family.image_layout(*size).grid_thw == tuple(grid)


def test_low_detail_caps_the_tokens_of_an_image(tmp_path: Path) -> None:
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 4096}
    directory = make_tiny_qwen2_5_vl(tmp_path, image_processor={"size": size})
    family = resolve_family(ModelConfig(source=str(directory)))
    large, low = family.image_layout(2000, 1000), family.image_layout(2000, 1000, detail="low")
    assert large == family.image_layout(2000, 1000, detail="high")
    assert large.num_tokens > 2000
    assert LOW_DETAIL_TOKENS * 0.8 < low.num_tokens <= LOW_DETAIL_TOKENS
    assert family.image_layout(100, 100, detail="low") == family.image_layout(100, 100)


def test_an_unknown_detail_is_the_clients_fault(family: Any) -> None:
    with pytest.raises(InvalidRequestError, match="detail must be"):
        family.image_layout(100, 100, detail="medium")


@pytest.mark.parametrize("size", [(0, 10), (10, 0), (201, 1), (1, 201)])
def test_an_image_that_cannot_be_resized_is_the_clients_fault(family: Any, size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequestError):
        family.image_layout(*size)
    with pytest.raises(InvalidRequestError):
        family.video_layout(*size, (0.0, 0.5))


# --- clips ------------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(num_frames=st.integers(1, 5000), fps=st.sampled_from([1.0, 5.0, 10.0, 23.976, 24.0, 25.0, 29.97, 30.0, 60.0]))
def test_frames_are_sampled_as_the_reference_does(family: Any, num_frames: int, fps: float) -> None:
    timestamps_s = family.video_timestamps(num_frames / fps, fps, num_frames)
    if num_frames == 1:
        assert timestamps_s == (0.0,)
        return
    # transformers' Qwen2VLVideoProcessor.sample_frames (its module needs torchvision), at 2 frames a second.
    most = min(768, num_frames) // 2 * 2
    expected = int(min(max(num_frames / fps * 2.0, 4), most, num_frames)) // 2 * 2
    assert len(timestamps_s) == expected
    assert timestamps_s[0] == 0.0
    assert list(timestamps_s) == sorted(set(timestamps_s))
    assert timestamps_s[-1] < num_frames / fps
    indices = [int(index * num_frames / expected) for index in range(expected)]
    assert [int(time_s * fps + 1e-6) for time_s in timestamps_s] == pytest.approx(indices, abs=1e-9)


def test_a_clip_of_unknown_duration_is_sampled_by_its_frames(family: Any) -> None:
    assert family.video_timestamps(0.0, 10.0, 20) == family.video_timestamps(2.0, 10.0, 20) == (0.0, 0.5, 1.0, 1.5)


def test_a_clip_takes_the_tokens_of_its_frame_pairs(family: Any) -> None:
    one = family.video_layout(112, 84, (0.0, 0.5))
    assert one.grid_thw[0] == 1
    layout = family.video_layout(112, 84, (0.0, 0.5, 1.0, 1.5, 2.0, 2.5))
    assert layout.grid_thw == (3, *one.grid_thw[1:])
    assert layout.num_tokens == 3 * one.num_tokens
    assert family.video_layout(112, 84, (0.0,)) == one


def test_a_long_clip_shares_the_token_budget_among_its_frames(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    video = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 768}, "max_video_tokens": 4000}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 14}))
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(video))
    settings = ProcessorSettings.read(tmp_path)
    assert settings.video_budget(4).max_pixels == 28 * 28 * 768
    assert settings.video_budget(100).max_pixels == int(4000 * 28 * 28 * 0.9) * 2 // 100
    assert settings.video_budget(100_000).max_pixels == int(56 * 56 * 1.05)


# --- processor settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"min_pixels": 3136, "max_pixels": 12845056},
        {"size": {"shortest_edge": 6272, "longest_edge": 50176}},
        {"size": {"shortest_edge": 6272, "longest_edge": 50176}, "max_pixels": 100352},
        {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.5, 0.5], "resample": 2, "patch_size": 16},
    ],
)
def test_processor_settings_are_those_that_transformers_reads(tmp_path: Path, config: dict[str, Any]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    written = {"image_processor_type": "Qwen2VLImageProcessor", **config}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    ours, theirs = ProcessorSettings.read(tmp_path), Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    assert (ours.image.min_pixels, ours.image.max_pixels) == (theirs.size.shortest_edge, theirs.size.longest_edge)
    assert ours.patches.patch_size == theirs.patch_size
    assert ours.patches.factor == theirs.patch_size * theirs.merge_size
    assert ours.patches.resample == theirs.resample
    assert ours.patches.rescale_factor == theirs.rescale_factor
    assert (list(ours.patches.mean), list(ours.patches.std)) == (list(theirs.image_mean), list(theirs.image_std))


def test_nested_processor_settings_come_before_plain_ones(tmp_path: Path) -> None:
    image = {"size": {"shortest_edge": 1, "longest_edge": 2}}
    video = {"size": {"shortest_edge": 3, "longest_edge": 4}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": image, "video_processor": video}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"shortest_edge": 5, "longest_edge": 6}}))
    settings = ProcessorSettings.read(tmp_path)
    assert (settings.image.min_pixels, settings.video.min_pixels) == (1, 3)


def test_a_checkpoint_without_video_settings_treats_frames_as_images(tmp_path: Path) -> None:
    config = {"size": {"shortest_edge": 7056, "longest_edge": 19600}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    settings = ProcessorSettings.read(tmp_path)
    assert settings.video == settings.image


def test_a_checkpoint_without_processor_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no image processor settings"):
        ProcessorSettings.read(tmp_path)


@pytest.mark.parametrize("is_nested", [True, False])
def test_the_prompt_config_is_read_from_nested_and_flat_files(tiny_qwen_dir: Path, is_nested: bool) -> None:
    from transformers import Qwen2_5_VLConfig

    written = json.loads((tiny_qwen_dir / "config.json").read_text())
    if not is_nested:
        written = {**written.pop("text_config"), **written}
    config, reference = PromptConfig.parse(written), Qwen2_5_VLConfig.from_pretrained(tiny_qwen_dir)
    assert config.image_token_id == reference.image_token_id
    assert config.video_token_id == reference.video_token_id
    assert config.hidden_size == reference.text_config.hidden_size
    assert config.max_position_embeddings == reference.text_config.max_position_embeddings
    assert config.merge_size == reference.vision_config.spatial_merge_size
    assert config.tokens_per_second == reference.vision_config.tokens_per_second


@pytest.mark.parametrize(
    "change",
    [{"quantization_config": {}}, {"text_config": {"hidden_size": 32}}, {"text_config": {"use_sliding_window": True}}],
)
def test_a_checkpoint_that_cannot_be_served_right_is_refused(tiny_qwen_dir: Path, change: dict[str, Any]) -> None:
    config = json.loads((tiny_qwen_dir / "config.json").read_text())
    with pytest.raises(ConfigError):
        PromptConfig.parse({**config, **change})


# --- placeholders -----------------------------------------------------------------------------------------------------


def test_each_placeholder_becomes_as_many_tokens_as_its_item_has(family: Any, token_id_of: dict[Modality, int]) -> None:
    image, video = token_id_of[Modality.IMAGE], token_id_of[Modality.VIDEO]
    layouts = [MediaLayout((1, 4, 4), 4), MediaLayout((2, 4, 2), 4), MediaLayout((1, 2, 2), 1)]
    expanded, ranges = family.expand_placeholders(
        [1, image, 2, video, image, 3], [Modality.IMAGE, Modality.VIDEO, Modality.IMAGE], layouts
    )
    assert expanded == (1, *[image] * 4, 2, *[video] * 4, image, 3)
    assert ranges == (PlaceholderRange(1, 4), PlaceholderRange(6, 4), PlaceholderRange(10, 1))


def test_a_text_prompt_is_left_as_it_is(family: Any) -> None:
    assert family.expand_placeholders([1, 2, 3], [], []) == ((1, 2, 3), ())


@pytest.mark.parametrize(
    ("placed", "sent"),
    [
        ([], [Modality.IMAGE]),
        ([Modality.IMAGE], []),
        ([Modality.IMAGE, Modality.IMAGE], [Modality.IMAGE]),
        ([Modality.VIDEO], [Modality.IMAGE]),
        ([Modality.IMAGE, Modality.VIDEO], [Modality.VIDEO, Modality.IMAGE]),
    ],
)
def test_placeholders_that_do_not_match_the_items_are_the_clients_fault(
    family: Any, token_id_of: dict[Modality, int], placed: Sequence[Modality], sent: Sequence[Modality]
) -> None:
    layouts = [MediaLayout((1, 2, 2), 1)] * len(sent)
    with pytest.raises(InvalidRequestError, match="The prompt has places for"):
        family.expand_placeholders([token_id_of[modality] for modality in placed], sent, layouts)


# --- rotary positions -------------------------------------------------------------------------------------------------

IMAGE, VIDEO = Modality.IMAGE, Modality.VIDEO
Item = tuple[Modality, tuple[int, int, int], float]
"""Modality, grid, and the frames sampled per second of a clip."""


@pytest.fixture(scope="module")
def rope_reference(tiny_qwen_dir: Path) -> Any:
    import torch
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    with torch.device("meta"):
        return Qwen2_5_VLModel(Qwen2_5_VLConfig.from_pretrained(tiny_qwen_dir))


def build_request(items: Sequence[Item], text_lengths: Sequence[int]) -> Request:
    ids = {IMAGE: 1, VIDEO: 2}
    tokens = [5] * text_lengths[0]
    media = []
    for index, ((modality, grid, fps), num_text) in enumerate(zip(items, text_lengths[1:], strict=True)):
        num_tokens = grid[0] * grid[1] * grid[2] // 4
        times = tuple(frame / fps for frame in range(grid[0] * 2)) if modality is VIDEO else ()
        media.append(MediaItem(index, modality, "h", PlaceholderRange(len(tokens), num_tokens), grid, times))
        tokens += [ids[modality]] * num_tokens + [6] * num_text
    return Request("r", tuple(tokens), SamplingParams(), tuple(media))


def assert_positions_equal_the_reference(family: Any, reference: Any, request: Request) -> None:
    import torch

    ids = torch.tensor([request.prompt_token_ids])
    types = torch.zeros_like(ids)
    for item in request.items:
        types[0, item.placeholder.offset : item.placeholder.end] = 1 if item.modality is IMAGE else 2
    clips = [item for item in request.items if item.modality is VIDEO]
    images = [item for item in request.items if item.modality is IMAGE]
    # As Qwen2_5_VLProcessor computes it: temporal_patch_size / sampled_fps, as a float32 tensor.
    seconds = [2 / (1 / (item.timestamps_s[1] - item.timestamps_s[0])) for item in clips]
    positions, deltas = reference.get_rope_index(
        ids,
        types,
        image_grid_thw=torch.tensor([item.grid_thw for item in images]) if images else None,
        video_grid_thw=torch.tensor([item.grid_thw for item in clips]) if clips else None,
        second_per_grid_ts=torch.tensor(seconds) if clips else None,
    )
    ours = family.rotary_positions(request)
    assert ours.positions.dtype == np.int64
    np.testing.assert_array_equal(ours.positions, positions[:, 0].numpy())
    assert ours.delta == deltas.item()


@pytest.mark.parametrize(
    ("items", "text_lengths"),
    [
        ([], [1]),
        ([], [17]),
        ([(IMAGE, (1, 4, 6), 0.0)], [3, 5]),
        ([(IMAGE, (1, 10, 2), 0.0)], [0, 0]),
        ([(IMAGE, (1, 4, 4), 0.0), (IMAGE, (1, 2, 8), 0.0)], [4, 2, 7]),
        ([(VIDEO, (3, 4, 4), 2.0)], [3, 5]),
        ([(VIDEO, (40, 2, 2), 2.0)], [3, 5]),
        ([(VIDEO, (5, 4, 4), 3.0)], [3, 0]),
        ([(IMAGE, (1, 4, 4), 0.0), (VIDEO, (2, 6, 4), 1.5), (IMAGE, (1, 2, 2), 0.0)], [1, 1, 2, 3]),
        # No text between two items of different kinds.
        ([(IMAGE, (1, 4, 4), 0.0), (VIDEO, (2, 6, 4), 2.0)], [1, 0, 2]),
    ],
)
def test_rotary_positions_equal_the_reference(
    family: Any, rope_reference: Any, items: Sequence[Item], text_lengths: Sequence[int]
) -> None:
    assert_positions_equal_the_reference(family, rope_reference, build_request(items, text_lengths))


GRIDS = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
ITEMS = st.one_of(
    st.builds(lambda grid: (IMAGE, (1, 2 * grid[1], 2 * grid[2]), 0.0), GRIDS),
    st.builds(lambda grid, fps: (VIDEO, (grid[0], 2 * grid[1], 2 * grid[2]), fps), GRIDS, st.floats(0.2, 30.0)),
)


@settings(max_examples=100, deadline=None)
@given(items=st.lists(ITEMS, max_size=5), data=st.data())
def test_rotary_positions_equal_the_reference_for_any_mix(
    family: Any, rope_reference: Any, items: list[Item], data: st.DataObject
) -> None:
    lengths = [data.draw(st.integers(1, 9)) for _ in range(len(items) + 1)]
    assert_positions_equal_the_reference(family, rope_reference, build_request(items, lengths))


def test_two_adjacent_images_keep_their_own_grids(family: Any) -> None:
    request = build_request([(IMAGE, (1, 4, 4), 0.0), (IMAGE, (1, 4, 4), 0.0)], [1, 0, 1])
    rotary = family.rotary_positions(request)
    np.testing.assert_array_equal(rotary.positions[0], [0, 1, 1, 1, 1, 3, 3, 3, 3, 5])
    np.testing.assert_array_equal(rotary.positions[2], [0, 1, 2, 1, 2, 3, 4, 3, 4, 5])
    assert rotary.delta == 6 - 10


@settings(max_examples=200, deadline=None)
@given(num_frames=st.integers(2, 2000), fps=st.floats(1.0, 120.0))
def test_sampled_clips_get_the_positions_of_the_reference(
    family: Any, rope_reference: Any, num_frames: int, fps: float
) -> None:
    import torch

    timestamps_s = family.video_timestamps(num_frames / fps, fps, num_frames)
    grid = family.video_layout(28, 28, timestamps_s).grid_thw
    num_tokens = grid[0] * grid[1] * grid[2] // 4
    item = MediaItem(0, VIDEO, "h", PlaceholderRange(0, num_tokens), grid, timestamps_s)
    sampled_fps = len(timestamps_s) / num_frames * fps  # transformers' VideoMetadata.sampled_fps
    expected, _ = rope_reference.get_rope_index(
        torch.ones(1, num_tokens, dtype=torch.int64),
        torch.full((1, num_tokens), 2),
        video_grid_thw=torch.tensor([grid]),
        second_per_grid_ts=torch.tensor([2 / sampled_fps]),
    )
    ours = family.rotary_positions(Request("r", (1,) * num_tokens, SamplingParams(), (item,)))
    np.testing.assert_array_equal(ours.positions, expected[:, 0].numpy())


@pytest.mark.parametrize("fps", [24.0, 25.0, 30.0, 50.0, 60.0])
@pytest.mark.parametrize("num_seconds", [2, 3, 7, 10])
def test_times_rounded_to_frames_of_the_file_give_the_same_positions(family: Any, fps: float, num_seconds: int) -> None:
    even = family.video_timestamps(float(num_seconds), fps, int(num_seconds * fps))
    rounded = tuple(int(time_s * fps + 1e-6) / fps for time_s in even)
    grid = family.video_layout(28, 28, even).grid_thw
    num_tokens = grid[0] * grid[1] * grid[2] // 4
    first, second = (
        family.rotary_positions(
            Request(
                "r",
                (1,) * num_tokens,
                SamplingParams(),
                (MediaItem(0, VIDEO, "h", PlaceholderRange(0, num_tokens), grid, times),),
            )
        ).positions
        for times in (even, rounded)
    )
    np.testing.assert_array_equal(first, second)
