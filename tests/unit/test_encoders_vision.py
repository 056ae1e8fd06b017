"""The vision tower: frames to patches to embeddings, compared with transformers.

If these fail, the model sees other pixels than the client sent, or an item's embedding depends on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from encoders import resolve_family
from epd.config import ModelConfig
from epd.engine.native import load_kernels
from epd.errors import MediaError
from epd.types import MediaItem, Modality, PlaceholderRange


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def family(tiny_qwen_dir: Path) -> Any:
    return resolve_family(ModelConfig(source=str(tiny_qwen_dir)))


@pytest.fixture(scope="module", params=["torch", "native"])
def encoder(family: Any, request: pytest.FixtureRequest) -> Any:
    """The tower on transformers' own blocks, and on the engine's kernels."""
    kernels = load_kernels(torch.float32) if request.param == "native" else None
    if request.param == "native" and kernels is None:
        pytest.skip("there is no C++ compiler here")
    return family.load_encoder(dtype="float32", kernels=kernels)


@pytest.fixture(scope="module")
def processor(tiny_qwen_dir: Path) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(tiny_qwen_dir)


@pytest.fixture(scope="module")
def reference(tiny_qwen_dir: Path) -> Any:
    from transformers import Qwen2_5_VLModel

    return Qwen2_5_VLModel.from_pretrained(tiny_qwen_dir, dtype="float32").eval()


def image_item(family: Any, image: Image.Image, *, detail: str = "auto") -> MediaItem:
    layout = family.image_layout(*image.size, detail=detail)
    return MediaItem(
        0, Modality.IMAGE, "h", PlaceholderRange(0, layout.num_tokens), layout.grid_thw, param="messages[0].content[1]"
    )


def video_item(family: Any, frames: Sequence[Image.Image], fps: float = 2.0) -> MediaItem:
    times = tuple(index / fps for index in range(len(frames)))
    layout = family.video_layout(*frames[0].size, times)
    return MediaItem(0, Modality.VIDEO, "h", PlaceholderRange(0, layout.num_tokens), layout.grid_thw, times)


def reference_clip_patches(processor: Any, frames: Sequence[Image.Image]) -> torch.Tensor:
    """Put the reference's patches of single frames in pairs: it holds each frame twice, once for each half."""
    singles = [processor(frame, return_tensors="pt").pixel_values.view(-1, 3, 2, 14 * 14) for frame in frames]
    pairs = [
        torch.stack([first[:, :, 0], second[:, :, 0]], dim=2)
        for first, second in zip(singles[::2], singles[1::2], strict=True)
    ]
    return torch.cat(pairs).flatten(1)


SIZES = [(140, 140), (56, 84), (300, 90), (448, 448), (31, 77), (28, 28)]


# --- preprocessing ----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(width=st.integers(8, 500), height=st.integers(8, 500), seed=st.integers(0, 9))
def test_patches_of_an_image_are_bit_for_bit_those_of_transformers(
    family: Any, encoder: Any, processor: Any, width: int, height: int, seed: int
) -> None:
    image = noise(width, height, seed)
    patches = encoder.preprocess(image_item(family, image), [image])
    assert patches.dtype == torch.float32
    assert torch.equal(patches, processor(image, return_tensors="pt").pixel_values)


def test_patches_of_a_clip_hold_pairs_of_frames(family: Any, encoder: Any, processor: Any) -> None:
    frames = [noise(100, 60, seed) for seed in range(4)]
    patches = encoder.preprocess(video_item(family, frames), frames)
    assert torch.equal(patches, reference_clip_patches(processor, frames))


def test_a_clip_of_one_frame_repeats_it(family: Any, encoder: Any, processor: Any) -> None:
    frame = noise(100, 60)
    patches = encoder.preprocess(video_item(family, [frame]), [frame])
    assert torch.equal(patches, processor(frame, return_tensors="pt").pixel_values)


def test_an_image_laid_out_for_low_detail_is_resized_to_that(tmp_path: Path) -> None:
    from tests.tiny_checkpoints import make_tiny_qwen2_5_vl

    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 4096}
    directory = make_tiny_qwen2_5_vl(tmp_path, image_processor={"size": size})
    family = resolve_family(ModelConfig(source=str(directory)))
    encoder = family.load_encoder(dtype="float32")
    image = noise(700, 700)
    for detail in ("low", "high"):
        item = image_item(family, image, detail=detail)
        assert encoder.preprocess(item, [image]).shape == (item.num_patches, 3 * 2 * 14 * 14)


def test_an_image_that_differs_from_its_header_is_the_clients_fault(family: Any, encoder: Any) -> None:
    item = image_item(family, noise(140, 140))
    with pytest.raises(MediaError, match="not of the size that its header says") as raised:
        encoder.preprocess(item, [noise(140, 280)])
    assert raised.value.param == "messages[0].content[1]"


def test_a_clip_with_missing_frames_is_the_clients_fault(family: Any, encoder: Any) -> None:
    frames = [noise(100, 60, seed) for seed in range(4)]
    item = video_item(family, frames)
    with pytest.raises(MediaError, match="has 3 frames, not 4"):
        encoder.preprocess(item, frames[:3])
    with pytest.raises(MediaError, match="differ in size"):
        encoder.preprocess(item, [*frames[:3], noise(60, 100)])


# --- the tower --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_an_embedding_equals_that_of_transformers(
    family: Any, encoder: Any, processor: Any, reference: Any, size: tuple[int, int]
) -> None:
    image = noise(*size)
    item = image_item(family, image)
    (embedding,) = encoder.encode([item], [encoder.preprocess(item, [image])])
    with torch.no_grad():
        expected = reference.get_image_features(**processor(image, return_tensors="pt")).pooler_output[0]
    assert embedding.values.shape == (item.num_tokens, family.embedding_width)
    torch.testing.assert_close(embedding.values, expected, rtol=1e-5, atol=1e-5)


def test_an_embedding_does_not_depend_on_its_batch(family: Any, encoder: Any, processor: Any, reference: Any) -> None:
    images = [noise(*size, seed) for seed, size in enumerate(SIZES)]
    frames = [noise(150, 90, seed) for seed in range(6)]
    items = [*(image_item(family, image) for image in images), video_item(family, frames)]
    patches = [encoder.preprocess(item, [image]) for item, image in zip(items, images, strict=False)]
    patches.append(encoder.preprocess(items[-1], frames))
    together = encoder.encode(items, patches)
    with torch.no_grad():
        pixels = processor(images, return_tensors="pt")
        expected = list(reference.get_image_features(**pixels).pooler_output)
        clip = reference_clip_patches(processor, frames)
        expected += reference.get_video_features(clip, torch.tensor([items[-1].grid_thw])).pooler_output
    assert [len(embedding.values) for embedding in together] == [item.num_tokens for item in items]
    for index, (item, embedding) in enumerate(zip(items, together, strict=True)):
        (alone,) = encoder.encode([item], [patches[index]])
        torch.testing.assert_close(embedding.values, alone.values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(embedding.values, expected[index], rtol=1e-5, atol=1e-5)


def test_embeddings_of_a_batch_do_not_share_memory(family: Any, encoder: Any) -> None:
    image = noise(140, 140)
    item = image_item(family, image)
    patches = encoder.preprocess(item, [image])
    first, second = encoder.encode([item, item], [patches, patches])
    assert first.values.untyped_storage().nbytes() == first.values.nbytes
    assert first.values.data_ptr() != second.values.data_ptr()
    assert torch.equal(first.values, second.values)


def test_pixels_change_an_embedding(family: Any, encoder: Any) -> None:
    red, blue = Image.new("RGB", (112, 112), (255, 0, 0)), Image.new("RGB", (112, 112), (0, 0, 255))
    item = image_item(family, red)
    patches = [encoder.preprocess(item, [image]) for image in (red, blue)]
    first, second = encoder.encode([item, item], patches)
    assert (first.values - second.values).abs().max() > 0.1


def test_patches_that_do_not_fit_the_placeholder_are_refused(family: Any, encoder: Any) -> None:
    image = noise(140, 140)
    item = image_item(family, image)
    patches = encoder.preprocess(item, [image])
    short = MediaItem(0, item.modality, "h", PlaceholderRange(0, item.num_tokens - 1), item.grid_thw)
    for wrong_item, wrong_patches in ((short, patches), (item, patches[:-4])):
        with pytest.raises(MediaError, match="tokens of the prompt"):
            encoder.encode([wrong_item], [wrong_patches])


def test_nothing_to_encode_gives_nothing(encoder: Any) -> None:
    assert encoder.encode([], []) == []


def test_a_bfloat16_tower_gives_bfloat16_embeddings(family: Any) -> None:
    encoder = family.load_encoder(dtype="bfloat16")
    full = family.load_encoder(dtype="float32")
    image = noise(140, 140)
    item = image_item(family, image)
    (half,) = encoder.encode([item], [encoder.preprocess(item, [image])])
    (exact,) = full.encode([item], [full.preprocess(item, [image])])
    assert half.values.dtype == torch.bfloat16
    assert encoder.weight_bytes * 2 == full.weight_bytes
    scale = exact.values.std()
    assert (half.values.float() - exact.values).abs().mean() < 0.1 * scale
