"""Options of sampling do the same in every mode: without this a user's seed, bias or penalty depends on the placement.

Each case runs in all four modes over real replicas, alone and among all the others, and every token is the one that a
plain float64 sampler draws from the logits of `transformers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from epd.config import EngineConfig
from epd.types import FinishReason, Mode, SamplingParams, TokenChunk, TokenLogprob
from tests.in_process import Prompt, in_process_cluster
from tests.reference import build, checkpoint, expected_tokens, logits_of, tokenizer_of
from tests.reference_sampler import logprob_of, next_token

MODES = [Mode.AGGREGATED, Mode.E_PD, Mode.EP_D, Mode.EPD]
SEEDED = {"temperature": 1.0, "seed": 17}
PROMPTS = ["no image", "three images of different sizes"]


@cache
def best_tokens() -> tuple[int, ...]:
    return expected_tokens("tiny", "no image")


@cache
def options_by_name() -> dict[str, dict[str, Any]]:
    best = best_tokens()
    return {
        "greedy": {},
        "temperature": {**SEEDED, "temperature": 1.7},
        "top_p": {**SEEDED, "temperature": 1.5, "top_p": 0.6},
        "top_k": {**SEEDED, "temperature": 1.5, "top_k": 3},
        "min_p": {**SEEDED, "temperature": 1.5, "min_p": 0.2},
        "top_p, top_k and min_p": {**SEEDED, "temperature": 1.9, "top_p": 0.9, "top_k": 8, "min_p": 0.02},
        "another seed": {"temperature": 1.7, "seed": -5},
        "presence penalty": {"presence_penalty": 2.0},
        "frequency penalty": {**SEEDED, "frequency_penalty": 1.5},
        "repetition penalty": {"repetition_penalty": 1.8},
        "all penalties": {**SEEDED, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2},
        "logit bias": {**SEEDED, "logit_bias": ((best[0], -100.0), (best[1], -3.0), (33, 4.0))},
        "stop token": {"stop_token_ids": (best[4],)},
        "stop token held off by min_tokens": {"stop_token_ids": (best[4],), "min_tokens": 8},
        "stop token at the first token": {"stop_token_ids": (best[0],)},
        "logprobs": {**SEEDED, "num_logprobs": 0},
        "top logprobs": {**SEEDED, "num_logprobs": 5, "frequency_penalty": 1.0, "top_p": 0.8},
        "one token": {**SEEDED, "max_tokens": 1, "num_logprobs": 3},
        "three choices": {**SEEDED, "n": 3, "num_logprobs": 2, "presence_penalty": 1.0},
        "three greedy choices": {"n": 3},
        "three choices of one token": {**SEEDED, "n": 3, "max_tokens": 1},
    }


def end_token() -> int:
    return tokenizer_of("tiny").convert_tokens_to_ids("<|im_end|>")


def prompts(**options: object) -> list[Prompt]:
    return [build("tiny", case, **options) for case in PROMPTS]


def per_choice(chunks: Sequence[TokenChunk]) -> dict[int, tuple[list[int], list[TokenLogprob], FinishReason | None]]:
    """Join what came of each choice: its tokens, their log probabilities, and why it ended."""
    joined: dict[int, tuple[list[int], list[TokenLogprob], FinishReason | None]] = {}
    for chunk in chunks:
        tokens, logprobs, reason = joined.get(chunk.choice, ([], [], None))
        assert reason is None, "a choice went on after its end"
        joined[chunk.choice] = [*tokens, *chunk.token_ids], [*logprobs, *chunk.logprobs], chunk.finish_reason
    return joined


@cache
def reference_logits(case: str, tokens: tuple[int, ...]):
    return logits_of("tiny", build("tiny", case), tokens)


def assert_is_what_the_reference_draws(prompt: Prompt, case: str, chunks: Sequence[TokenChunk]) -> None:
    params, answers = prompt.request.sampling, per_choice(chunks)
    assert sorted(answers) == list(range(params.n))
    for choice, (tokens, logprobs, reason) in answers.items():
        rows = reference_logits(case, tuple(tokens))
        ends = {end_token(), *params.stop_token_ids}
        for position, token in enumerate(tokens):
            forbidden = ends if position < params.min_tokens else ()
            said, before = tokens[:position], prompt.request.prompt_token_ids
            assert token == next_token(rows[position], params, before, said, choice=choice, forbidden=forbidden)
        assert len(logprobs) == (0 if params.num_logprobs is None else len(tokens))
        for row, token, logprob in zip(rows, tokens, logprobs, strict=False):
            assert_close(logprob, logprob_of(row, token, params.num_logprobs))
        assert_ended_rightly(params, tokens, reason)


def assert_close(made: TokenLogprob, wanted: TokenLogprob) -> None:
    assert made.token_id == wanted.token_id
    assert made.logprob == pytest.approx(wanted.logprob, abs=1e-4)
    assert [entry[0] for entry in made.top] == [entry[0] for entry in wanted.top]
    assert [entry[1] for entry in made.top] == pytest.approx([entry[1] for entry in wanted.top], abs=1e-4)


def assert_ended_rightly(params: SamplingParams, tokens: Sequence[int], reason: FinishReason | None) -> None:
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {end_token()})
    assert not ends.intersection(tokens[:-1])
    assert reason is (FinishReason.STOP if tokens[-1] in ends else FinishReason.LENGTH)
    assert len(tokens) == params.max_tokens or reason is FinishReason.STOP
    assert len(tokens) >= min(params.min_tokens, params.max_tokens)


@pytest.mark.parametrize("mode", MODES)
async def test_every_option_draws_what_the_reference_draws(mode):
    async with in_process_cluster(checkpoint("tiny")) as cluster:
        for name, options in options_by_name().items():
            for case, prompt in zip(PROMPTS, prompts(**options), strict=True):
                _, chunks = await cluster.run(prompt.request, prompt.payloads, mode)
                try:
                    assert_is_what_the_reference_draws(prompt, case, chunks)
                except AssertionError as error:
                    raise AssertionError(f"{name}, {case}") from error
        await cluster.check_integrity()


async def test_every_option_draws_the_same_among_all_others_in_every_mode():
    """Some eighty requests at once, each with options of its own, over the same replicas."""
    runs, asked = [], []
    async with in_process_cluster(checkpoint("tiny")) as cluster:
        for mode in MODES:
            for options in options_by_name().values():
                prompt = build("tiny", PROMPTS[1], **options)
                asked.append(prompt)
                runs.append(cluster.run(prompt.request, prompt.payloads, mode))
        for prompt, (_, chunks) in zip(asked, await asyncio.gather(*runs), strict=True):
            assert_is_what_the_reference_draws(prompt, PROMPTS[1], chunks)
        await cluster.check_integrity()


@pytest.mark.parametrize("num_extra", range(4))
@pytest.mark.parametrize("mode", MODES)
async def test_three_choices_are_the_same_whether_or_not_their_last_block_is_full(mode, num_extra):
    """Blocks of four tokens: some prompts end with a block, the others leave one to copy."""
    prompt = build("tiny", "no image", **SEEDED, n=3)
    longer = replace(prompt.request, prompt_token_ids=prompt.request.prompt_token_ids + (33,) * num_extra)
    prompt = replace(prompt, request=longer)
    engine = EngineConfig(block_size=4, kv_cache_bytes=2**20, num_threads=1)
    async with in_process_cluster(checkpoint("tiny"), engine=engine, names=("p", "d", "all")) as cluster:
        tokens, _ = await cluster.run(prompt.request, {}, mode)
        for choice in range(3):
            rows = logits_of("tiny", prompt, tokens[choice])
            for position, token in enumerate(tokens[choice]):
                said = tokens[choice][:position]
                wanted = next_token(rows[position], longer.sampling, longer.prompt_token_ids, said, choice=choice)
                assert token == wanted
        assert len({tuple(each) for each in tokens.values()}) == 3
        assert cluster.workers["p" if mode.splits_decode else "all"].stats().prefill_tokens == len(
            longer.prompt_token_ids
        )
        await cluster.check_integrity()


@pytest.mark.parametrize("mode", MODES)
async def test_the_end_token_ends_a_choice_unless_ignored_or_held_off(mode):
    """The checkpoint never prefers its end token, so a bias makes it."""
    bias = {"logit_bias": ((end_token(), 100.0),), "ignore_eos": False}
    expected = {
        "ends at once": (bias, [end_token()]),
        "held off": ({**bias, "min_tokens": 3}, [*best_tokens()[:3], end_token()]),
        "ignored": ({**bias, "ignore_eos": True}, [end_token()] * 12),
        "ignored and held off": ({**bias, "ignore_eos": True, "min_tokens": 12}, list(best_tokens())),
    }
    async with in_process_cluster(checkpoint("tiny")) as cluster:
        for name, (options, wanted) in expected.items():
            prompt = build("tiny", "no image", **options)
            tokens, chunks = await cluster.run(prompt.request, prompt.payloads, mode)
            assert tokens == {0: wanted}, name
            assert chunks[-1].finish_reason is (FinishReason.LENGTH if options["ignore_eos"] else FinishReason.STOP), (
                name
            )
        await cluster.check_integrity()


@pytest.mark.parametrize("mode", [Mode.EP_D, Mode.EPD])
async def test_choices_that_end_at_their_first_token_are_left_out_of_the_decode(mode):
    """Of three choices the ones that stop with prefill do not decode, and the others do."""
    free = build("tiny", "one image", temperature=2.0, seed=3, n=3)
    async with in_process_cluster(checkpoint("tiny")) as cluster:
        tokens, _ = await cluster.run(free.request, free.payloads, mode)
        firsts = [tokens[choice][0] for choice in range(3)]
        assert len(set(firsts)) > 1
        stopping = replace(free.request.sampling, stop_token_ids=(firsts[0],))
        stopped, _ = await cluster.run(replace(free.request, sampling=stopping), free.payloads, mode)
        for choice in range(3):
            whole = tokens[choice]
            length = whole.index(firsts[0]) + 1 if firsts[0] in whole else len(whole)
            assert stopped[choice] == whole[:length]
        await cluster.check_integrity()
