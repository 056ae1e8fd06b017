"""One contract for all model runners: the tokens of a dense pass, whatever a step is made of.

If these fail, a replica on one kind of device gives other answers than one on another. The CUDA runner runs here over
a kernel that computes on the CPU what FlashAttention is documented to compute; its graphs are run again, not replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from epd.cache.kv_cache import KVCache, allocate_kv_cache
from epd.config import EngineConfig
from epd.engine.engine import Engine
from epd.engine.model_runner import ModelRunner, Runner
from epd.engine.runners import build_runner, check_device
from epd.errors import ConfigError
from epd.types import Embedding, LanguageModel, MediaItem, Modality, PlaceholderRange, Request, SamplingParams
from tests.fake_language_model import HIDDEN, FakeLanguageModel, text_positions
from tests.reference import build, embeddings_of, expected_tokens, family_of
from tests.runner_contract import check_logits, num_blocks_needed
from tests.varlen_reference import RerunRecorder, cuda_runner_on_cpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=9)
NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS = 64, 4, 8


def _torch(model: LanguageModel, cache: KVCache) -> Runner:
    return ModelRunner(model, cache)


def _eager(model: LanguageModel, cache: KVCache) -> Runner:
    return cuda_runner_on_cpu(model, cache, None)


def _graphs(model: LanguageModel, cache: KVCache) -> Runner:
    return cuda_runner_on_cpu(model, cache, RerunRecorder())


RUNNERS = {"torch": _torch, "varlen": _eager, "varlen with graphs": _graphs}
MakeRunner = Callable[[LanguageModel, KVCache], Runner]


@pytest.fixture(params=RUNNERS)
def make_runner(request) -> MakeRunner:
    return RUNNERS[request.param]


def make_engine(make_runner: MakeRunner, *, num_blocks: int = NUM_BLOCKS, max_tokens: int = 16):
    model = FakeLanguageModel()
    cache = allocate_kv_cache(model.kv_spec, block_size=BLOCK_SIZE, num_blocks=num_blocks, model_fingerprint="fake")
    config = EngineConfig(block_size=BLOCK_SIZE, max_num_batched_tokens=max_tokens, max_num_seqs=MAX_SEQS)
    return Engine(model, cache, config, runner=make_runner(model, cache)), model


def prompts(*lengths: int, sampling: SamplingParams = GREEDY) -> list[Request]:
    return [
        Request(f"r{index}", tuple((7 * index + 3 * position) % 50 for position in range(length)), sampling)
        for index, length in enumerate(lengths)
    ]


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, dict[int, list[int]]]:
    for request in requests:
        engine.add(request, text_positions(request.num_prompt_tokens))
    return finish(engine)


def finish(engine: Engine) -> dict[str, dict[int, list[int]]]:
    tokens: dict[str, dict[int, list[int]]] = {}
    while engine.has_work:
        for request_id, chunks in engine.step().chunks.items():
            for chunk in chunks:
                tokens.setdefault(request_id, {}).setdefault(chunk.choice, []).extend(chunk.token_ids)
    engine.check_integrity()
    return tokens


def expected(model: FakeLanguageModel, request: Request, *embeddings: torch.Tensor) -> list[int]:
    return model.reference(request, text_positions(request.num_prompt_tokens), embeddings)


def test_chunks_and_decodes_of_a_batch_each_get_their_own_tokens(make_runner):
    engine, model = make_engine(make_runner, max_tokens=9)
    requests = prompts(3, 11, 30, 8, 1)
    tokens = run(engine, requests)
    for request in requests:
        assert tokens[request.request_id][0] == expected(model, request)


def test_batches_of_every_size_give_the_same_tokens(make_runner):
    engine, model = make_engine(make_runner)
    for num_seqs in range(1, MAX_SEQS + 1):
        requests = [replace(r, request_id=f"{r.request_id}-{num_seqs}") for r in prompts(*range(2, 2 + num_seqs))]
        tokens = run(engine, requests)
        for request in requests:
            assert tokens[request.request_id][0] == expected(model, request)


def test_a_preempted_request_gives_the_same_tokens(make_runner):
    engine, model = make_engine(make_runner, num_blocks=9, max_tokens=32)
    requests = prompts(9, 9, 9, sampling=replace(GREEDY, max_tokens=12))
    tokens = run(engine, requests)
    assert engine.stats.preemptions > 0
    for request in requests:
        assert tokens[request.request_id][0] == expected(model, request)


def test_a_prefix_hit_gives_the_same_tokens(make_runner):
    engine, model = make_engine(make_runner)
    (request,) = prompts(14)
    run(engine, [request])
    tokens = run(engine, [replace(request, request_id="again")])
    assert engine.stats.prefix_hit_tokens == 12
    assert tokens["again"][0] == expected(model, request)


def test_choices_that_share_a_prompt_are_drawn_as_by_the_reference(make_runner):
    sampling = SamplingParams(temperature=0.8, seed=5, n=3, max_tokens=6)
    reference, _ = make_engine(_torch)
    engine, _ = make_engine(make_runner)
    requests = prompts(10, sampling=sampling)
    assert run(engine, requests) == run(reference, requests)


def test_a_placeholder_alone_in_a_step_gets_its_embedding(make_runner):
    engine, model = make_engine(make_runner, max_tokens=MAX_SEQS)
    item = MediaItem(0, Modality.IMAGE, "image", PlaceholderRange(3, 6), (1, 2, 12))
    request = Request("r", (1, 2, 3, *[9] * 6, 4), GREEDY, items=(item,))
    rows = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    engine.add(request, text_positions(request.num_prompt_tokens))
    engine.set_embedding("r", 0, Embedding(rows))
    # Seven others leave one token of a step's budget: the image is prefilled row by row, beside decodes alone.
    for other in prompts(*[1] * 7, sampling=replace(GREEDY, max_tokens=30)):
        engine.add(replace(other, request_id=f"other-{other.request_id}"), text_positions(1))
    assert finish(engine)["r"][0] == expected(model, request, rows)


def test_blocks_prefilled_elsewhere_decode_to_the_same_tokens(make_runner):
    source, model = make_engine(make_runner)
    target, _ = make_engine(make_runner)
    (request,) = prompts(11)
    rotary = text_positions(11)
    source.add(request, rotary, keep_kv=True)
    done = next(output.prefilled[0] for output in iter(source.step, None) if output.prefilled)
    granted: list = []
    target.reserve(request, done.num_tokens, granted.append)
    target.kv_cache.blocks[granted[0].missing_blocks] = source.kv_cache.blocks[list(done.block_ids)]
    source.release_hold(done.hold_id)
    target.activate(granted[0], done.first_tokens, rotary, has_kv=True)
    assert [*done.first_tokens[0].token_ids, *finish(target)["r0"][0]] == expected(model, request)
    source.check_integrity()


def test_padding_writes_to_no_block_that_somebody_may_hold():
    engine, _ = make_engine(_graphs)
    requests = prompts(3, 3, 3, sampling=replace(GREEDY, max_tokens=3))
    for request in requests:
        engine.add(request, text_positions(3))
    engine.step()
    before = engine.kv_cache.blocks.clone()
    engine.step()  # three decodes in a graph of four
    changed = (engine.kv_cache.blocks != before).flatten(1).any(1).nonzero().flatten().tolist()
    held = {sequence.block_table[0] for sequence in engine.scheduler.running}
    assert set(changed) <= held


@pytest.mark.parametrize("num_seqs", [1, 3, 8])
def test_steps_of_decodes_alone_are_replayed_and_others_are_not(num_seqs):
    recorder = RerunRecorder()
    engine, _ = make_engine(lambda model, cache: cuda_runner_on_cpu(model, cache, recorder), max_tokens=64)
    run(engine, prompts(*[5] * num_seqs))
    assert engine.stats.num_steps == GREEDY.max_tokens
    assert recorder.num_replays == GREEDY.max_tokens - 1


def test_a_sequence_longer_than_the_graphs_were_made_for_runs_without_them():
    recorder = RerunRecorder()
    engine, model = make_engine(
        lambda model, cache: cuda_runner_on_cpu(model, cache, recorder, max_context_tokens=8), max_tokens=64
    )
    (request,) = prompts(5)
    assert run(engine, [request])["r0"][0] == expected(model, request)
    assert recorder.num_replays == 3  # with contexts of 6, 7 and 8 tokens


def test_results_that_leave_the_device_are_ids_where_ids_are_enough():
    model = FakeLanguageModel()
    cache = allocate_kv_cache(model.kv_spec, block_size=4, num_blocks=8, model_fingerprint="fake")
    runner = _graphs(model, cache)
    engine = Engine(model, cache, EngineConfig(block_size=4, max_num_seqs=8), runner=runner)
    seen = []
    start = runner.start

    def watch(*args):
        pending = start(*args)
        seen.append(pending.wait())
        return pending

    runner.start = watch
    run(engine, prompts(4, sampling=replace(GREEDY, max_tokens=2)))
    assert all(logits.values.shape[0] == 0 and len(logits.greedy_ids) == 1 for logits in seen)
    seen.clear()
    run(engine, prompts(4, sampling=SamplingParams(max_tokens=2)))
    assert all(logits.values.shape[0] == 1 and logits.greedy_ids is None for logits in seen)


@pytest.mark.parametrize("case", ["no image", "one image", "three images of different sizes"])
def test_tokens_of_a_real_model_equal_generate(make_runner, case):
    family = family_of("tiny")
    model = family.load_language_model(dtype="float32")
    cache = allocate_kv_cache(model.kv_spec, block_size=8, num_blocks=64, model_fingerprint="tiny")
    config = EngineConfig(block_size=8, max_num_batched_tokens=24, max_num_seqs=8)
    engine = Engine(model, cache, config, runner=make_runner(model, cache))
    prompt = build("tiny", case)
    engine.add(prompt.request, family.rotary_positions(prompt.request))
    for index, embedding in enumerate(embeddings_of("tiny", prompt)):
        engine.set_embedding(prompt.request.request_id, index, embedding)
    (tokens,) = finish(engine).values()
    assert tuple(tokens[0]) == expected_tokens("tiny", case)


@pytest.mark.parametrize("chunk", [19, 1000])
@pytest.mark.parametrize(("dtype", "block_size"), [("float32", 8), ("float32", 256), ("bfloat16", 256)])
def test_logits_equal_a_plain_forward_pass(make_runner, dtype, block_size, chunk):
    model = family_of("tiny").load_language_model(dtype=dtype)
    num_blocks = num_blocks_needed(block_size) + 3
    cache = allocate_kv_cache(model.kv_spec, block_size=block_size, num_blocks=num_blocks, model_fingerprint="tiny")
    check_logits(make_runner(model, cache), cache, chunk=chunk)


# -- the choice


def test_a_device_that_is_not_there_is_refused_by_name():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match=r"args\.engine\.device: cuda is asked for.*num_gpus"):
        check_device(EngineConfig(device="cuda"))
    check_device(EngineConfig())


def test_a_cpu_gets_the_plain_runner():
    model = FakeLanguageModel()
    cache = allocate_kv_cache(model.kv_spec, block_size=4, num_blocks=8, model_fingerprint="fake")
    assert type(build_runner(model, cache, EngineConfig(compile=False))) is ModelRunner
