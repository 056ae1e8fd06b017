"""What `transformers` answers to a set of prompts: the tokens of `generate` and the logits of a whole forward pass.

Over the checkpoints that tests load, in float32 on one thread, from the pixels on. Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

from encoders import resolve_family
from epd.config import ModelConfig
from epd.types import Embedding, ModelFamily, Request, SamplingParams
from tests.in_process import Prompt, make_prompt, prompt_of_tokens, random_image
from tests.tiny_checkpoints import tiny_qwen2_5_vl

DEMO = Path(__file__).parents[1] / "encoders" / "demo_model"
CHECKPOINTS = {"tiny": tiny_qwen2_5_vl, "demo": lambda: DEMO}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

PARTS: dict[str, list[str | Image.Image]] = {
    "no image": ["How many shapes are there?"],
    "one image": [random_image(1, 112, 84), "What color is the circle?"],
    "three images of different sizes": [
        "Look: ",
        random_image(2, 56, 112),
        random_image(3, 84, 84),
        " and then ",
        random_image(4, 140, 56),
        "Which image shows a red circle?",
    ],
    "adjacent images": ["Look: ", random_image(5, 84, 112), random_image(6, 112, 84), random_image(7, 84, 84)],
}
"""Cases that go through the chat template."""

BARE_PARTS: dict[str, list[str | Image.Image]] = {
    "an image first": [random_image(8, 112, 84), "What color is the circle?"],
    "an image last": ["Describe the picture: ", random_image(9, 84, 112)],
    "nothing but images around a word": [random_image(10, 84, 84), " and ", random_image(11, 112, 112)],
}
"""Cases of bare token ids: the first or the last token of the prompt is an image's."""

CASES = (*PARTS, *BARE_PARTS)


@cache
def checkpoint(name: str) -> Path:
    return CHECKPOINTS[name]()


@cache
def model_of(name: str) -> Qwen2_5_VLForConditionalGeneration:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint(name), dtype=torch.float32).eval()


@cache
def tokenizer_of(name: str):
    return AutoTokenizer.from_pretrained(checkpoint(name))


@cache
def family_of(name: str) -> ModelFamily:
    return resolve_family(ModelConfig(source=str(checkpoint(name))))


@cache
def _processor_of(name: str) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil.from_pretrained(checkpoint(name))


@cache
def _encoder_of(name: str):
    return family_of(name).load_encoder(dtype="float32")


def build(name: str, case: str, **sampling: object) -> Prompt:
    """Return a case as a request; ``sampling`` replaces fields of ``GREEDY``."""
    return build_parts(name, (PARTS | BARE_PARTS)[case], is_bare=case in BARE_PARTS, **sampling)


def build_parts(name: str, parts: Sequence[str | Image.Image], *, is_bare: bool = False, **sampling: object) -> Prompt:
    """Return a request of text and image parts, through the chat template or ``is_bare`` of it."""
    params = replace(GREEDY, **sampling)  # type: ignore[arg-type]
    if not is_bare:
        return make_prompt(family_of(name), tokenizer_of(name), parts, sampling=params)
    token_ids: list[int] = []
    for part in parts:
        is_text = isinstance(part, str)
        token_ids += tokenizer_of(name).encode(part) if is_text else [model_of(name).config.image_token_id]
    images = [part for part in parts if not isinstance(part, str)]
    return prompt_of_tokens(family_of(name), token_ids, images, sampling=params)


def num_shared_tokens(first: Request, second: Request) -> int:
    """Return how many tokens two prompts share from the start on, the same media behind them."""
    pairs = list(zip(first.prompt_token_ids, second.prompt_token_ids, strict=False))
    count = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
    for one, other in zip(first.items, second.items, strict=False):
        if one.mm_hash != other.mm_hash:
            count = min(count, one.placeholder.offset, other.placeholder.offset)
    return count


def embeddings_of(name: str, prompt: Prompt) -> list[Embedding]:
    """Return what the encoder under test makes of a prompt's images, one by one."""
    return [
        _embedding(name, prompt.payloads[item.index], image, item)
        for item, image in zip(prompt.request.items, prompt.images, strict=True)
    ]


_EMBEDDINGS: dict[tuple[str, bytes], Embedding] = {}


def _embedding(name: str, payload: bytes, image: Image.Image, item) -> Embedding:
    key = (name, payload)
    if key not in _EMBEDDINGS:
        encoder = _encoder_of(name)
        _EMBEDDINGS[key] = encoder.encode([item], [encoder.preprocess(item, [image])])[0]
    return _EMBEDDINGS[key]


def _inputs(name: str, prompt: Prompt, output: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    ids = torch.tensor([[*prompt.request.prompt_token_ids, *output]])
    if not prompt.images:
        return {"input_ids": ids}
    pixels = _processor_of(name)(list(prompt.images), return_tensors="pt")
    types = (ids == model_of(name).config.image_token_id).int()
    return {"input_ids": ids, **pixels, "mm_token_type_ids": types}


def generated(name: str, prompt: Prompt, num_tokens: int = GREEDY.max_tokens) -> tuple[int, ...]:
    """Return ``num_tokens`` greedy tokens as ``generate`` makes them, end tokens ignored.

    Not for a prompt that ends in an image: there ``generate`` (of 5.24) counts positions on from the last image token,
    axis by axis, where the model itself goes on after the largest. Such a prompt gets the model's own greedy tokens.
    """
    if prompt.request.items and prompt.request.items[-1].placeholder.end == prompt.request.num_prompt_tokens:
        return _greedy(name, prompt, num_tokens)
    inputs = _inputs(name, prompt)
    with torch.inference_mode():
        output = model_of(name).generate(
            **inputs, do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens, eos_token_id=None
        )
    return tuple(output[0, inputs["input_ids"].shape[1] :].tolist())


def _greedy(name: str, prompt: Prompt, num_tokens: int) -> tuple[int, ...]:
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(int(logits_of(name, prompt, [*output, 0])[-1].argmax()))
    return tuple(output)


def logits_of(name: str, prompt: Prompt, output: Sequence[int]) -> torch.Tensor:
    """Return float32 logits ``[len(output), vocab_size]``: row ``i`` is what token ``i`` of the output was chosen by.

    One forward pass over prompt and output, without a cache.
    """
    with torch.inference_mode():
        logits = model_of(name)(**_inputs(name, prompt, output[:-1]), use_cache=False).logits[0]
    return logits[prompt.request.num_prompt_tokens - 1 :]


@cache
def expected_tokens(name: str, case: str, num_tokens: int = GREEDY.max_tokens) -> tuple[int, ...]:
    return generated(name, build(name, case), num_tokens)


@cache
def expected_logits(name: str, case: str, num_tokens: int = GREEDY.max_tokens) -> torch.Tensor:
    return logits_of(name, build(name, case), expected_tokens(name, case, num_tokens))
