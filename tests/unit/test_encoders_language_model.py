"""The language model on its own, compared with transformers over whole prompts.

If these fail, outputs differ from those of transformers' ``generate``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from encoders import resolve_family
from epd.config import ModelConfig
from epd.types import MediaItem, Modality, PlaceholderRange, Request, SamplingParams
from tests.tiny_checkpoints import make_tiny_qwen2_5_vl


class DenseCache:
    """Keys and values of one sequence in plain tensors: stands in for the paged cache and its attention batch."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, **kwargs: Any) -> Any:
        if layer_idx in self._layers:
            old_key, old_value = self._layers[layer_idx]
            key, value = torch.cat([old_key, key], dim=2), torch.cat([old_value, value], dim=2)
        self._layers[layer_idx] = key, value
        return key, value

    def attend(self, layer_idx: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        key, value = self._layers[layer_idx]
        num_new, num_all = query.shape[1], key.shape[2]
        mask = torch.ones(num_new, num_all, dtype=torch.bool).tril(num_all - num_new)
        out = F.scaled_dot_product_attention(query[None], key, value, mask, scale=scaling, enable_gqa=True)
        return out[0].transpose(0, 1)


def run(model: Any, hidden: torch.Tensor, positions: torch.Tensor, chunk: int | None = None) -> torch.Tensor:
    cache = DenseCache()
    chunk = chunk or len(hidden)
    parts = [
        model.forward(hidden[start : start + chunk], positions[:, start : start + chunk], cache, cache)
        for start in range(0, len(hidden), chunk)
    ]
    return model.logits(torch.cat(parts))


@pytest.fixture(scope="module")
def family(tiny_qwen_dir: Path) -> Any:
    return resolve_family(ModelConfig(source=str(tiny_qwen_dir)))


@pytest.fixture(scope="module")
def model(family: Any) -> Any:
    return family.load_language_model(dtype="float32")


@pytest.fixture(scope="module")
def reference(tiny_qwen_dir: Path) -> Any:
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_qwen_dir, dtype="float32").eval()


def text_request(token_ids: list[int]) -> Request:
    return Request("r", tuple(token_ids), SamplingParams())


def test_text_logits_equal_those_of_transformers(family: Any, model: Any, reference: Any) -> None:
    ids = torch.randint(0, 380, (40,), generator=torch.Generator().manual_seed(1))
    rotary = family.rotary_positions(text_request(ids.tolist()))
    logits = run(model, model.embed(ids), torch.from_numpy(rotary.positions))
    with torch.no_grad():
        expected = reference(input_ids=ids[None]).logits[0]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [None, 5])
def test_logits_over_images_and_a_clip_equal_those_of_transformers(
    family: Any, model: Any, reference: Any, chunk: int | None
) -> None:
    grids = [(1, 6, 4), (2, 4, 4), (1, 2, 8)]
    kinds = [Modality.IMAGE, Modality.VIDEO, Modality.IMAGE]
    config = reference.config
    token_of = {Modality.IMAGE: config.image_token_id, Modality.VIDEO: config.video_token_id}
    tokens, items = [7, 8, 9], []
    for index, (kind, grid) in enumerate(zip(kinds, grids, strict=True)):
        count = grid[0] * grid[1] * grid[2] // 4
        times = (0.0, 0.5, 1.0, 1.5) if kind is Modality.VIDEO else ()
        items.append(MediaItem(index, kind, "h", PlaceholderRange(len(tokens), count), grid, times))
        tokens += [token_of[kind]] * count + [20 + index, 30]
    request = Request("r", tuple(tokens), SamplingParams(), tuple(items))
    encoder = family.load_encoder(dtype="float32")
    generator = torch.Generator().manual_seed(2)
    patches = [torch.randn(item.num_patches, 3 * 2 * 14 * 14, generator=generator) for item in items]
    embeddings = encoder.encode(items, patches)

    ids = torch.tensor(tokens)
    hidden = model.embed(ids)
    for item, embedding in zip(items, embeddings, strict=True):
        hidden[item.placeholder.offset : item.placeholder.end] = embedding.values
    logits = run(model, hidden, torch.from_numpy(family.rotary_positions(request).positions), chunk)

    types = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    with torch.no_grad():
        expected = reference(
            input_ids=ids[None],
            mm_token_type_ids=types[None],
            pixel_values=torch.cat([patches[0], patches[2]]),
            image_grid_thw=torch.tensor([grids[0], grids[2]]),
            pixel_values_videos=patches[1],
            video_grid_thw=torch.tensor([grids[1]]),
            second_per_grid_ts=torch.tensor([1.0]),
        ).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_greedy_outputs_equal_generate_and_vary(family: Any, model: Any, reference: Any) -> None:
    ids = torch.arange(30, 60)
    rotary = family.rotary_positions(text_request(ids.tolist()))
    cache, hidden, positions = DenseCache(), model.embed(ids), torch.from_numpy(rotary.positions)
    output: list[int] = []
    for index in range(len(ids), len(ids) + 24):
        last = model.forward(hidden, positions, cache, cache)[-1:]
        output.append(int(model.logits(last).argmax()))
        hidden = model.embed(torch.tensor(output[-1:]))
        positions = torch.full((3, 1), index + rotary.delta)
    generated = reference.generate(
        ids[None], attention_mask=torch.ones(1, len(ids)), do_sample=False, max_new_tokens=24
    )
    assert output == generated[0, len(ids) :].tolist()
    assert len(set(output)) > 6


def test_an_untied_head_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    directory = make_tiny_qwen2_5_vl(tmp_path, tie_word_embeddings=False)
    family = resolve_family(ModelConfig(source=str(directory)))
    model = family.load_language_model(dtype="float32")
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype="float32").eval()
    assert not torch.equal(reference.lm_head.weight, reference.get_input_embeddings().weight)
    ids = torch.arange(10, 40)
    logits = run(model, model.embed(ids), torch.arange(30).expand(3, -1))
    with torch.no_grad():
        torch.testing.assert_close(logits, reference(input_ids=ids[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_it_describes_its_kv_cache_and_size(model: Any, reference: Any) -> None:
    spec = model.kv_spec
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == (3, 2, 16)
    assert spec.bytes_per_token == 2 * 3 * 2 * 16 * 4
    language = sum(p.nbytes for p in reference.model.language_model.parameters())
    assert model.weight_bytes == language
    assert (model.hidden_size, model.vocab_size) == (64, reference.config.text_config.vocab_size)


@pytest.mark.parametrize(("generation", "expected"), [({"eos_token_id": [3, 5]}, {3, 5}), ({"eos_token_id": 4}, {4})])
def test_the_tokens_that_end_an_output_are_those_of_generate(
    tiny_qwen_dir: Path, tmp_path: Path, generation: dict[str, Any], expected: set[int]
) -> None:
    directory = shutil.copytree(tiny_qwen_dir, tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps(generation))
    model = resolve_family(ModelConfig(source=str(directory))).load_language_model(dtype="float32")
    assert model.eos_token_ids == expected


def test_without_a_generation_config_the_models_own_end_token_counts(tiny_qwen_dir: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_qwen_dir, tmp_path / "model")
    (directory / "generation_config.json").unlink()
    model = resolve_family(ModelConfig(source=str(directory))).load_language_model(dtype="float32")
    config = json.loads((directory / "config.json").read_text())
    assert model.eos_token_ids == {config["text_config"]["eos_token_id"]}
