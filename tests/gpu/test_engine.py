"""A replica on a GPU gives the answers that one on a CPU gives: in every mode, cut, batched, cached and preempted.

The contracts are those of the CPU's tests, over an engine, an encoder and KV blocks that live on the device.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from epd.cache.kv_cache import KVCache, allocate_kv_cache
from epd.config import EngineConfig
from epd.engine.cuda.buckets import decode_buckets
from epd.engine.cuda.runner import CudaModelRunner
from epd.engine.engine import Engine
from epd.engine.model_runner import ModelRunner, Runner
from epd.engine.runners import build_runner
from epd.engine.warmup import warm_up
from epd.errors import ConfigError
from epd.transfer.factory import resolve_backend
from epd.types import Mode, Request, SamplingParams
from tests.fake_language_model import text_positions
from tests.in_process import in_process_cluster
from tests.reference import build, checkpoint, expected_tokens, family_of
from tests.runner_contract import check_logits, num_blocks_needed

BACKENDS = sorted({"by_reference", resolve_backend("auto")})
MODES = [Mode.AGGREGATED, Mode.E_PD, Mode.EP_D, Mode.EPD]
CASES = ["no image", "one image", "three images of different sizes", "adjacent images"]
MAX_SEQS = 8


def engine_config(**fields: object) -> EngineConfig:
    return EngineConfig(**{"device": "cuda", "kv_cache_bytes": 16 * 2**20, "max_num_seqs": MAX_SEQS, **fields})


def make_runner(dtype: str, config: EngineConfig, num_blocks: int) -> tuple[Runner, KVCache]:
    model = family_of("tiny").load_language_model(dtype=dtype, device="cuda")
    cache = allocate_kv_cache(
        model.kv_spec,
        block_size=config.kv_block_size,
        num_blocks=num_blocks,
        model_fingerprint="tiny",
        device="cuda",
    )
    runner = build_runner(model, cache, config)
    runner.capture_graphs()
    return runner, cache


def make_engine(dtype: str, *, num_blocks: int = 32, **fields: object) -> Engine:
    config = engine_config(**fields)
    runner, cache = make_runner(dtype, config, num_blocks)
    return Engine(runner.model, cache, config, runner=runner)  # type: ignore[attr-defined]


def prompts(*lengths: int, max_tokens: int = 12) -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [
        Request(f"r{index}", tuple(30 + (7 * index + 3 * position) % 200 for position in range(length)), sampling)
        for index, length in enumerate(lengths)
    ]


def run(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    for request in requests:
        engine.add(request, text_positions(request.num_prompt_tokens))
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for request_id, chunks in engine.step().chunks.items():
            tokens[request_id] += [token for chunk in chunks for token in chunk.token_ids]
    engine.check_integrity()
    return tokens


# -- the runner


@pytest.mark.parametrize("chunk", [1, 19, 1000])
@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize(("dtype", "block_size"), [("float32", 16), ("bfloat16", 256), ("float16", 512)])
def test_logits_equal_a_plain_forward_pass(dtype, block_size, has_graphs, chunk):
    config = engine_config(block_size=block_size, cuda_graphs=has_graphs)
    runner, cache = make_runner(dtype, config, num_blocks_needed(block_size) + 3)
    check_logits(runner, cache, chunk=chunk)


def test_half_precision_gets_flash_attention_and_float32_the_plain_runner():
    assert isinstance(make_runner("bfloat16", engine_config(), 4)[0], CudaModelRunner)
    assert isinstance(make_runner("float32", engine_config(), 4)[0], ModelRunner)


def test_a_block_size_that_flash_attention_does_not_take_is_refused():
    with pytest.raises(ConfigError, match=r"args\.engine\.block_size"):
        make_runner("bfloat16", engine_config(block_size=16), 4)


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 7, 8])
def test_graphs_give_the_tokens_that_eager_steps_give(num_seqs):
    requests = prompts(*range(5, 5 + 9 * num_seqs, 9))
    tokens = [run(make_engine("float16", cuda_graphs=has_graphs), requests) for has_graphs in (True, False)]
    same = sum(
        a == b
        for one, other in zip(*(t.values() for t in tokens), strict=True)
        for a, b in zip(one, other, strict=True)
    )
    # Rows of a matrix product may round differently in a batch that is padded: a near tie may fall the other way.
    assert same >= 0.9 * sum(map(len, tokens[0].values()))


def test_every_batch_size_is_captured_once_and_the_pool_is_shared():
    runner, _ = make_runner("bfloat16", engine_config(max_num_seqs=64, max_num_batched_tokens=64), 32)
    assert isinstance(runner, CudaModelRunner)
    assert runner.capture_graphs() == len(decode_buckets(64))


def test_padding_writes_to_no_block_but_scratch():
    engine = make_engine("bfloat16", max_num_batched_tokens=64)
    for request in prompts(3, 3, 3):
        engine.add(request, text_positions(3))
    engine.step()
    before = engine.kv_cache.blocks.clone()
    engine.step()
    changed = (engine.kv_cache.blocks != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert set(changed) == {sequence.block_table[0] for sequence in engine.scheduler.running}


def test_a_warm_up_leaves_blocks_empty():
    runner, cache = make_runner("bfloat16", engine_config(), 8)
    warm_up(runner, cache, max_num_batched_tokens=1024, max_num_seqs=MAX_SEQS)
    torch.cuda.synchronize()
    assert not cache.blocks.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampling_with_a_seed_gives_the_same_tokens_twice(dtype):
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=20, ignore_eos=True)
    requests = [replace(request, sampling=sampling) for request in prompts(20, 30)]
    engine = make_engine(dtype, enable_prefix_cache=False)
    first = run(engine, requests)
    assert run(engine, requests) == first


# -- in every mode


@pytest.mark.parametrize("backend", BACKENDS)
async def test_tokens_equal_generate_in_every_mode(backend):
    async with in_process_cluster(checkpoint("tiny"), backend=backend, engine=engine_config()) as cluster:
        for case in CASES:
            prompt = build("tiny", case)
            for mode in MODES:
                tokens, _ = await cluster.run(prompt.request, prompt.payloads, mode)
                assert tuple(tokens[0]) == expected_tokens("tiny", case), f"{case}, {mode}"
        await cluster.check_integrity()


@pytest.mark.parametrize("mode", MODES)
async def test_tokens_equal_generate_when_a_chunk_is_smaller_than_an_image(mode):
    engine = engine_config(max_num_batched_tokens=5, max_num_seqs=4)
    async with in_process_cluster(checkpoint("tiny"), engine=engine) as cluster:
        for case in CASES:
            prompt = build("tiny", case)
            tokens, _ = await cluster.run(prompt.request, prompt.payloads, mode)
            assert tuple(tokens[0]) == expected_tokens("tiny", case), case
        await cluster.check_integrity()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_half_precision_gives_the_same_tokens_in_every_mode(dtype):
    """One request at a time, so that every mode runs the same shapes; blocks move from device to device."""
    async with in_process_cluster(checkpoint("tiny"), engine=engine_config(), dtype=dtype) as cluster:
        for case in ("no image", "one image"):
            prompt = build("tiny", case)
            answers = {}
            for mode in MODES:
                tokens, _ = await cluster.run(prompt.request, prompt.payloads, mode)
                answers[mode] = tokens[0]
            assert len(set(map(tuple, answers.values()))) == 1, f"{case}: {answers}"
        await cluster.check_integrity()


# -- blocks that run short, and blocks that are found


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_prefix_hit_and_a_preemption_change_no_token(dtype):
    block_size = 256
    requests = prompts(300, 300, 300, max_tokens=260)
    roomy = make_engine(dtype, block_size=block_size, num_blocks=32)
    alone = {request.request_id: run(roomy, [request])[request.request_id] for request in requests}
    again = run(roomy, [replace(request, request_id=f"again-{request.request_id}") for request in requests])
    assert roomy.stats.prefix_hit_tokens >= 3 * block_size
    tight = make_engine(dtype, block_size=block_size, num_blocks=7, enable_prefix_cache=False)
    squeezed = run(tight, requests)
    assert tight.stats.preemptions > 0
    if dtype == "float32":  # in half precision other batches round otherwise, and a near tie may fall the other way
        assert squeezed == alone
        assert {f"again-{name}": tokens for name, tokens in alone.items()} == again
    assert all(len(tokens) == 260 for tokens in squeezed.values())
