"""Tokens equal ``transformers``' own ``generate`` in every mode, over every transport, alone and in company.

If this fails, splitting a request changes what the user reads, or the model gives other answers here than elsewhere.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

from epd.config import EngineConfig
from epd.transfer.factory import resolve_backend
from epd.types import Mode, SamplingParams, Stage
from tests.in_process import Prompt, in_process_cluster, make_prompt, random_image, until
from tests.tiny_checkpoints import tiny_qwen2_5_vl

DEMO = Path(__file__).parents[2] / "encoders" / "demo_model"
CHECKPOINTS = {"tiny": tiny_qwen2_5_vl, "demo": lambda: DEMO}
BACKENDS = sorted({"by_reference", resolve_backend("auto")})
MODES = [Mode.AGGREGATED, Mode.E_PD, Mode.EP_D, Mode.EPD]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

PARTS = {
    "text only": ["How many shapes are there?"],
    "one image": [random_image(1, 112, 84), "What color is the circle?"],
    "three images of different sizes": [
        "Look: ",
        random_image(2, 56, 112),
        random_image(3, 84, 84),
        " and then ",
        random_image(4, 140, 56),
        "Which image shows a red circle?",
    ],
}


@cache
def reference_model(name: str) -> Qwen2_5_VLForConditionalGeneration:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(CHECKPOINTS[name](), dtype=torch.float32).eval()


@cache
def tokenizer_of(name: str):
    return AutoTokenizer.from_pretrained(CHECKPOINTS[name]())


@cache
def expected_tokens(name: str, case: str, num_tokens: int = GREEDY.max_tokens) -> tuple[int, ...]:
    """What ``transformers`` generates for a case, from the pixels on."""
    prompt = build(name, case)
    inputs = {"input_ids": torch.tensor([prompt.request.prompt_token_ids])}
    if prompt.images:
        processor = Qwen2VLImageProcessorPil.from_pretrained(CHECKPOINTS[name]())
        pixels = processor(list(prompt.images), return_tensors="pt")
        types = (inputs["input_ids"] == reference_model(name).config.image_token_id).int()
        inputs |= {**pixels, "mm_token_type_ids": types}
    with torch.inference_mode():
        output = reference_model(name).generate(
            **inputs, do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens, eos_token_id=None
        )
    return tuple(output[0, inputs["input_ids"].shape[1] :].tolist())


@cache
def family_of(name: str):
    from encoders import resolve_family
    from epd.config import ModelConfig

    return resolve_family(ModelConfig(source=str(CHECKPOINTS[name]())))


def build(name: str, case: str) -> Prompt:
    return make_prompt(family_of(name), tokenizer_of(name), PARTS[case], sampling=GREEDY)


def block_bytes(block_size: int) -> int:
    """Size of a KV block of the tiny checkpoint."""
    config = reference_model("tiny").config.text_config
    head_dim = config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4 * block_size


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CHECKPOINTS)
async def test_tokens_equal_generate_in_every_mode(name, backend):
    async with in_process_cluster(CHECKPOINTS[name](), backend=backend) as cluster:
        for case in PARTS:
            prompt = build(name, case)
            for mode in MODES:
                tokens, _ = await cluster.run(prompt.request, prompt.payloads, mode)
                assert tuple(tokens[0]) == expected_tokens(name, case), f"{case}, {mode}"
        await cluster.check_integrity()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CHECKPOINTS)
async def test_tokens_equal_generate_in_a_mixed_batch_of_16(name, backend):
    async with in_process_cluster(CHECKPOINTS[name](), backend=backend) as cluster:
        cases = [(case, mode) for case in PARTS for mode in MODES]
        cases = (cases + cases)[:16]
        runs = [cluster.run(build(name, case).request, build(name, case).payloads, mode) for case, mode in cases]
        for (case, mode), (tokens, _) in zip(cases, await asyncio.gather(*runs), strict=True):
            assert tuple(tokens[0]) == expected_tokens(name, case), f"{case}, {mode}"
        await cluster.check_integrity()


@pytest.mark.parametrize("mode", MODES)
async def test_tokens_equal_generate_when_a_chunk_is_smaller_than_an_image(mode):
    engine = EngineConfig(kv_cache_bytes=8 * 2**20, num_threads=1, max_num_batched_tokens=5, max_num_seqs=4)
    async with in_process_cluster(CHECKPOINTS["tiny"](), engine=engine) as cluster:
        for case in PARTS:
            prompt = build("tiny", case)
            tokens, _ = await cluster.run(prompt.request, prompt.payloads, mode)
            assert tuple(tokens[0]) == expected_tokens("tiny", case), case
        await cluster.check_integrity()


@pytest.mark.parametrize("mode", MODES)
async def test_tokens_equal_generate_after_a_preemption(mode):
    """Blocks for less than the running requests need: the youngest is computed again, or resumes elsewhere."""
    num_tokens = 40
    cases = ["one image", "three images of different sizes", "one image", "text only"]
    decode = "d" if mode.splits_decode else "all"
    longest = build("tiny", "three images of different sizes").request.num_prompt_tokens + num_tokens
    num_blocks = -(-longest // 4) + 12
    engines = {decode: EngineConfig(block_size=4, kv_cache_bytes=num_blocks * block_bytes(4), num_threads=1)}
    roomy = EngineConfig(block_size=4, kv_cache_bytes=8 * 2**20, num_threads=1)
    async with in_process_cluster(CHECKPOINTS["tiny"](), engine=roomy, engines=engines) as cluster:
        worker = cluster.workers[decode]
        is_open = threading.Event()
        worker.engine_thread.post(lambda engine: is_open.wait(60))
        sampling = replace(GREEDY, max_tokens=num_tokens)
        prompts = [build("tiny", case) for case in cases]
        requests = [replace(prompt.request, sampling=sampling) for prompt in prompts]
        runs = [
            asyncio.create_task(cluster.run(request, prompt.payloads, mode))
            for request, prompt in zip(requests, prompts, strict=True)
        ]
        await until(lambda: worker.stats().running_requests[Stage.DECODE] == len(cases))
        is_open.set()
        for case, (tokens, _) in zip(cases, await asyncio.gather(*runs), strict=True):
            assert tuple(tokens[0]) == expected_tokens("tiny", case, num_tokens), case
        assert worker.stats().preemptions > 0
        await cluster.check_integrity()
