"""Logits equal those of `transformers`: without this a user gets another model than the one that they asked for.

Whatever the engine does to a prompt (cut it in chunks, mix it with others, find parts of it in the prefix cache, hand
its blocks over, throw them away and start again), every token is chosen by the numbers of one plain forward pass.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from epd.cache.kv_cache import allocate_kv_cache
from epd.config import EngineConfig
from epd.engine.engine import Engine, PrefillDone
from epd.engine.model_runner import ModelRunner
from epd.engine.reservations import Reservation
from epd.types import Embedding
from tests.in_process import Prompt, random_image
from tests.reference import (
    CASES,
    CHECKPOINTS,
    GREEDY,
    build,
    build_parts,
    embeddings_of,
    expected_logits,
    expected_tokens,
    family_of,
    generated,
    logits_of,
    num_shared_tokens,
)

BLOCK_SIZE = 8
TOLERANCE = 1e-4
IMAGE = random_image(1, 112, 84)
OTHER_IMAGE = random_image(20, 112, 84)


class LogitRecorder:
    """The logits that engines made, by request, choice and position in the output; several where computed again."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int, int], list[torch.Tensor]] = defaultdict(list)

    def assert_equal(self, request_id: str, reference: torch.Tensor) -> None:
        for position, wanted in enumerate(reference):
            made = self.rows[request_id, 0, position]
            assert made, f"{request_id}: token {position} was never chosen"
            for row in made:
                assert float((row - wanted).abs().max()) < TOLERANCE, f"{request_id}, token {position}"


@pytest.fixture
def recorder(monkeypatch) -> LogitRecorder:
    recorder = LogitRecorder()
    run = ModelRunner.run

    def recording(runner, num_tokens, logit_sequences):
        logits = run(runner, num_tokens, logit_sequences)
        for sequence, row in zip(logit_sequences, logits, strict=True):
            recorder.rows[sequence.request.request_id, sequence.choice, sequence.num_output_tokens].append(row.clone())
        return logits

    monkeypatch.setattr(ModelRunner, "run", recording)
    return recorder


@cache
def language_model(name: str):
    return family_of(name).load_language_model(dtype="float32")


def make_engine(name: str, *, num_blocks: int = 512, max_tokens: int = 512, max_seqs: int = 16, **fields) -> Engine:
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        kv_cache_bytes=1,
        max_num_batched_tokens=max_tokens,
        max_num_seqs=min(max_seqs, max_tokens),
        num_threads=1,
        **fields,
    )
    model = language_model(name)
    cache = allocate_kv_cache(model.kv_spec, block_size=BLOCK_SIZE, num_blocks=num_blocks, model_fingerprint=name)
    return Engine(model, cache, config)


def named(prompt: Prompt, request_id: str) -> Prompt:
    return replace(prompt, request=replace(prompt.request, request_id=request_id))


def add(engine: Engine, name: str, prompt: Prompt, *, keep_kv: bool = False) -> None:
    request = prompt.request
    engine.add(request, family_of(name).rotary_positions(request), keep_kv=keep_kv)
    for index, embedding in enumerate(embeddings_of(name, prompt)):
        engine.set_embedding(request.request_id, index, embedding)


def run(engine: Engine, tokens: dict[str, list[int]]) -> list[str]:
    """Step to the end, adding tokens by request; return the requests that were given back."""
    returned: list[str] = []
    while engine.has_work:
        output = engine.step()
        for request_id, chunks in output.chunks.items():
            for chunk in chunks:
                tokens[request_id].extend(chunk.token_ids)
        returned.extend(output.returned)
    return returned


def prefill(engine: Engine, name: str, prompt: Prompt) -> PrefillDone:
    add(engine, name, prompt, keep_kv=True)
    return next(output.prefilled[0] for output in iter(engine.step, None) if output.prefilled)


def hand_over(source: Engine, target: Engine, name: str, prompt: Prompt, tokens: dict[str, list[int]]) -> Reservation:
    """Prefill on one engine and let the other go on with a copy of the blocks that it lacks."""
    request, done = prompt.request, prefill(source, name, prompt)
    granted: list[Reservation] = []
    target.reserve(request, done.num_tokens, granted.append)
    (reservation,) = granted
    wanted = list(done.block_ids[reservation.num_cached_blocks :])
    target.kv_cache.blocks[reservation.missing_blocks] = source.kv_cache.blocks[wanted]
    source.release_hold(done.hold_id)
    source.check_integrity()
    target.activate(reservation, done.first_tokens, family_of(name).rotary_positions(request), has_kv=True)
    tokens[request.request_id].extend(done.first_tokens[0].token_ids)
    return reservation


def odd_chunks(prompt: Prompt) -> Iterator[int]:
    """Steps that cut prompts in unusual places."""
    yield from (1, 3, 5, 7, BLOCK_SIZE - 1, BLOCK_SIZE + 1)
    for num_tokens in sorted({item.num_tokens for item in prompt.request.items}):
        yield from (num_tokens - 1, num_tokens + 1)


@pytest.mark.parametrize("compile_kernel", ["auto", False], ids=["native", "torch"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_a_plain_forward_pass(name, case, compile_kernel, recorder):
    engine = make_engine(name, compile=compile_kernel)
    tokens = defaultdict(list)
    add(engine, name, build(name, case))
    run(engine, tokens)
    assert tuple(tokens["request"]) == expected_tokens(name, case)
    recorder.assert_equal("request", expected_logits(name, case))
    engine.check_integrity()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_do_not_depend_on_where_a_prompt_is_cut(name, case, recorder):
    tokens = defaultdict(list)
    sizes = set(odd_chunks(build(name, case)))
    for size in sizes:
        engine = make_engine(name, max_tokens=size)
        add(engine, name, named(build(name, case), f"{size}"))
        run(engine, tokens)
        assert engine.stats.num_steps >= build(name, case).request.num_prompt_tokens // size
    for size in sizes:
        assert tuple(tokens[f"{size}"]) == expected_tokens(name, case)
        recorder.assert_equal(f"{size}", expected_logits(name, case))


@pytest.mark.parametrize("num_batched_tokens", [7, 29, 512])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_do_not_depend_on_who_shares_the_batch(name, num_batched_tokens, recorder):
    engine = make_engine(name, max_tokens=num_batched_tokens, max_seqs=7)
    tokens = defaultdict(list)
    for case in CASES:
        add(engine, name, named(build(name, case), case))
        engine.step()
    run(engine, defaultdict(list))
    for case in CASES:
        recorder.assert_equal(case, expected_logits(name, case))
    assert not tokens
    engine.check_integrity()


@pytest.mark.parametrize("num_batched_tokens", [3, 512])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_the_same_when_another_replica_decodes(name, num_batched_tokens, recorder):
    """Each prompt is handed over on its own; then all decode together."""
    source, target = make_engine(name, max_tokens=num_batched_tokens), make_engine(name)
    tokens = defaultdict(list)
    for case in CASES:
        hand_over(source, target, name, named(build(name, case), case), tokens)
    run(target, tokens)
    for case in CASES:
        assert tuple(tokens[case]) == expected_tokens(name, case)
        recorder.assert_equal(case, expected_logits(name, case))
    target.check_integrity()


# -- prefix cache ------------------------------------------------------------------------------------------------------

LONG = "The quick brown fox jumps over the lazy dog, and the green bird sings in the tree. "
PREFIXES = {
    "the text before another image": ([LONG, OTHER_IMAGE, "What color is the circle?"], 0),
    "text and image": ([LONG, IMAGE, "How many shapes are there?"], 1),
    "the whole prompt": ([LONG, IMAGE, "What color is the circle?"], 2),
}
"""What is shared with a prompt that ran before, and how many items (2: everything)."""


def prefix_pair(name: str, shared: str) -> tuple[Prompt, Prompt, int]:
    """Two prompts, and how many tokens of the second one the prefix cache has after the first."""
    first = named(build_parts(name, PREFIXES["the whole prompt"][0]), "first")
    second = named(build_parts(name, PREFIXES[shared][0]), "second")
    common = num_shared_tokens(first.request, second.request)
    # A prompt that is cached whole still computes its last token.
    num_cached = min(common, second.request.num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert num_cached > 0
    return first, second, num_cached


@pytest.mark.parametrize("shared", PREFIXES)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_after_a_prefix_cache_hit_are_those_of_a_cold_start(name, shared, recorder):
    first, second, num_cached = prefix_pair(name, shared)
    engine = make_engine(name)
    tokens = defaultdict(list)
    add(engine, name, first)
    run(engine, tokens)
    num_before = engine.stats.prefill_tokens
    add(engine, name, second)
    run(engine, tokens)
    assert engine.stats.prefill_tokens - num_before == second.request.num_prompt_tokens - num_cached
    for prompt in (first, second):
        assert_is_reference(name, prompt, tokens, recorder)
    engine.check_integrity()


@pytest.mark.parametrize("shared", PREFIXES)
@pytest.mark.parametrize("is_target_warm", [True, False], ids=["both warm", "prefill warm"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_after_hits_on_prefill_and_decode_replicas_are_those_of_a_cold_start(
    name, is_target_warm, shared, recorder
):
    first, second, num_cached = prefix_pair(name, shared)
    source, target, other = make_engine(name), make_engine(name), make_engine(name)
    tokens = defaultdict(list)
    hand_over(source, target if is_target_warm else other, name, first, tokens)
    run(target, tokens)
    run(other, tokens)
    reservation = hand_over(source, target, name, second, tokens)
    assert source.stats.prefix_hit_tokens == num_cached
    common = num_shared_tokens(first.request, second.request) // BLOCK_SIZE
    assert reservation.num_cached_blocks == (common if is_target_warm else 0)
    run(target, tokens)
    for prompt in (first, second):
        assert_is_reference(name, prompt, tokens, recorder)
    target.check_integrity()


def assert_is_reference(name: str, prompt: Prompt, tokens, recorder: LogitRecorder) -> None:
    request_id = prompt.request.request_id
    wanted = generated_of(name, prompt)
    assert tuple(tokens[request_id]) == wanted
    recorder.assert_equal(request_id, reference_logits(name, prompt, wanted))


_GENERATED: dict[tuple, object] = {}


def generated_of(name: str, prompt: Prompt) -> tuple[int, ...]:
    key = (name, prompt.request.prompt_token_ids, prompt.request.items)
    if key not in _GENERATED:
        _GENERATED[key] = generated(name, prompt)
    return _GENERATED[key]


def reference_logits(name: str, prompt: Prompt, tokens: Sequence[int]) -> torch.Tensor:
    key = (name, prompt.request.prompt_token_ids, prompt.request.items, tuple(tokens))
    if key not in _GENERATED:
        _GENERATED[key] = logits_of(name, prompt, tokens)
    return _GENERATED[key]


# -- preemption --------------------------------------------------------------------------------------------------------

NUM_TOKENS = 40


def crowd(name: str) -> list[Prompt]:
    cases = ["one image", "three images of different sizes", "no image", "adjacent images"]
    return [named(build(name, case, max_tokens=NUM_TOKENS), case) for case in cases]


def blocks_for(prompts: Sequence[Prompt]) -> int:
    """Enough for the largest of them to finish, and for all to start, but not for all to finish."""
    longest = max(prompt.request.num_prompt_tokens + NUM_TOKENS for prompt in prompts)
    starts = sum(-(-(prompt.request.num_prompt_tokens + 2) // BLOCK_SIZE) for prompt in prompts)
    return max(-(-longest // BLOCK_SIZE), starts)


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_after_a_preemption_are_those_of_an_undisturbed_run(name, prefix_cache, recorder):
    prompts = crowd(name)
    engine = make_engine(name, num_blocks=blocks_for(prompts), enable_prefix_cache=prefix_cache)
    tokens = defaultdict(list)
    for prompt in prompts:
        add(engine, name, prompt)
    run(engine, tokens)
    assert engine.stats.preemptions > 0
    for prompt in prompts:
        case = prompt.request.request_id
        assert tuple(tokens[case]) == expected_tokens(name, case, NUM_TOKENS)
        recorder.assert_equal(case, expected_logits(name, case, NUM_TOKENS))
    engine.check_integrity()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_after_a_decode_only_replica_gave_a_request_back_are_those_of_an_undisturbed_run(name, recorder):
    """It is prefilled again elsewhere, prompt and tokens so far, and comes back when there is room."""
    prompts = {prompt.request.request_id: prompt for prompt in crowd(name)}
    source, target = make_engine(name), make_engine(name, num_blocks=blocks_for(list(prompts.values())))
    tokens = defaultdict(list)
    for prompt in prompts.values():
        hand_over(source, target, name, prompt, tokens)
    returned = run(target, tokens)
    assert returned
    while returned:
        again = []
        for case in returned:
            resumed = prompts[case].request.resume_choice(0, tokens[case])
            hand_over(source, target, name, replace(prompts[case], request=resumed), tokens)
            again += run(target, tokens)
        returned = again
    for case in prompts:
        assert tuple(tokens[case]) == expected_tokens(name, case, NUM_TOKENS)
        recorder.assert_equal(case, expected_logits(name, case, NUM_TOKENS))
    target.check_integrity()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_of_prompts_whose_images_arrive_late_and_out_of_order_are_those_of_one_pass(name, recorder):
    rng = random.Random(5)
    engine = make_engine(name, max_tokens=11)
    late: list[tuple[str, int, Embedding]] = []
    for case in CASES:
        prompt = named(build(name, case), case)
        engine.add(prompt.request, family_of(name).rotary_positions(prompt.request))
        late += [(case, index, embedding) for index, embedding in enumerate(embeddings_of(name, prompt))]
    rng.shuffle(late)
    for request_id, index, embedding in late:
        for _ in range(rng.randrange(4)):
            engine.step()
        engine.set_embedding(request_id, index, embedding)
    run(engine, defaultdict(list))
    for case in CASES:
        recorder.assert_equal(case, expected_logits(name, case, GREEDY.max_tokens))
    engine.check_integrity()
