"""Sampling: without these, a seed gives other text in another mode, and options that clients set do nothing."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.engine.sampler import SampleRow, sample, uniform_noise
from epd.types import SamplingParams
from tests.reference_sampler import logprob_of, next_token

LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]]))


def draw(params: SamplingParams, position: int, logits: torch.Tensor = LOGITS, **fields) -> int:
    return sample(logits, [SampleRow(0, params, 0, position, **fields)])[0].token_id


def drawn(params: SamplingParams, count: int = 2000, **fields) -> Counter:
    return Counter(draw(params, position, **fields) for position in range(count))


def test_noise_is_a_function_of_seed_choice_and_position():
    values = {
        uniform_noise(seed, choice, position) for seed in range(5) for choice in range(5) for position in range(5)
    }
    assert len(values) == 125
    assert all(0 <= value < 1 for value in values)
    assert uniform_noise(1, 2, 3) == uniform_noise(1, 2, 3)


def test_noise_is_uniform():
    values = [uniform_noise(42, 0, position) for position in range(20_000)]
    buckets = Counter(int(value * 10) for value in values)
    assert all(abs(count - 2000) < 200 for count in buckets.values())


def test_frequencies_follow_the_distribution():
    counts = drawn(SamplingParams(temperature=1.0, seed=1), 8000)
    for token, probability in enumerate([0.5, 0.25, 0.15, 0.1]):
        assert abs(counts[token] / 8000 - probability) < 0.02


def test_temperature_sharpens():
    assert drawn(SamplingParams(temperature=0.25, seed=1))[0] > 1800


@pytest.mark.parametrize(
    ("params", "possible"),
    [
        (SamplingParams(top_k=2, seed=3), {0, 1}),
        (SamplingParams(top_p=0.7, seed=3), {0, 1}),
        (SamplingParams(top_p=0.0001, seed=3), {0}),
        (SamplingParams(min_p=0.29, seed=3), {0, 1, 2}),
        (SamplingParams(top_k=100, seed=3), {0, 1, 2, 3}),
        (SamplingParams(logit_bias=((0, -100.0), (3, 5.0)), seed=3), {1, 2, 3}),
    ],
)
def test_truncation_leaves_exactly_the_allowed_tokens(params, possible):
    assert set(drawn(params)) == possible


def test_greedy_takes_the_best_and_forbidden_tokens_are_never_drawn():
    greedy = SamplingParams(temperature=0.0)
    assert draw(greedy, 0) == 0
    assert draw(greedy, 0, forbidden_ids=[0]) == 1
    assert 1 not in drawn(SamplingParams(seed=1), forbidden_ids=[1])


def test_penalties_move_probability_away_from_what_was_said():
    assert draw(SamplingParams(temperature=0.0, presence_penalty=1.0), 0, output_token_ids=[0]) == 1
    assert draw(SamplingParams(temperature=0.0, frequency_penalty=0.4), 0, output_token_ids=[0, 0]) == 1
    assert draw(SamplingParams(temperature=0.0, frequency_penalty=0.4), 0, output_token_ids=[0]) == 0
    assert draw(SamplingParams(temperature=0.0, repetition_penalty=3.0), 0, prompt_token_ids=[0]) == 1


def test_logprobs_are_those_of_the_model():
    token = sample(LOGITS, [SampleRow(0, SamplingParams(temperature=0.5, seed=2, num_logprobs=2), 0, 0)])[0]
    assert token.logprob is not None
    assert math.isclose(token.logprob.logprob, float(LOGITS[0, token.token_id]), abs_tol=1e-6)
    assert [token_id for token_id, _ in token.logprob.top] == [0, 1]


def test_a_row_draws_the_same_whatever_stands_beside_it():
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=5)
    rows = [SampleRow(index, params, index, 7) for index in range(6)]
    together = [token.token_id for token in sample(logits, rows)]
    alone = [sample(logits[i : i + 1], [SampleRow(0, params, i, 7)])[0].token_id for i in range(6)]
    assert together == alone


@pytest.mark.parametrize("temperature", [1e-3, 1e-45, 5e-324])
def test_the_smallest_temperatures_take_the_best_token(temperature):
    logits = 20 * torch.randn(1, 40, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=temperature, seed=1)
    assert {draw(params, position, logits) for position in range(20)} == {int(logits.argmax())}


def test_noise_never_changes():
    """Replicas of two versions may work on one request, and a user may keep a seed."""
    assert uniform_noise(1, 2, 3) == 0.05816240739533696
    assert uniform_noise(-1, 0, 0) == 0.3662420901697574
    assert uniform_noise(2**63 - 1, 127, 100_000) == 0.34105231515972234


VOCAB = 60
token_ids = st.integers(0, VOCAB - 1)


@st.composite
def sampling_params(draw) -> SamplingParams:
    """Any mixture of options, each of them often left alone."""

    def some(neutral, strategy):
        return draw(st.one_of(st.just(neutral), strategy))

    return SamplingParams(
        temperature=some(1.0, st.one_of(st.just(0.0), st.floats(0.05, 2.0))),
        top_p=some(1.0, st.floats(0.01, 1.0)),
        top_k=some(0, st.integers(1, VOCAB + 5)),
        min_p=some(0.0, st.floats(0.001, 1.0)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        presence_penalty=some(0.0, st.floats(-2.0, 2.0)),
        frequency_penalty=some(0.0, st.floats(-2.0, 2.0)),
        repetition_penalty=some(1.0, st.floats(0.5, 2.0)),
        logit_bias=tuple(draw(st.dictionaries(token_ids, st.floats(-100, 100), max_size=3)).items()),
    )


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    sampling_params(),
    st.integers(0, 2**32),
    st.lists(token_ids, min_size=1, max_size=12),
    st.lists(token_ids, max_size=12),
    st.sets(token_ids, max_size=4),
    st.integers(0, 4),
)
def test_every_mixture_of_options_draws_what_a_plain_reference_draws(params, seed, prompt, output, forbidden, choice):
    logits = 4 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    for position in range(len(output) + 1):
        said = output[:position]
        row = SampleRow(0, params, choice, position, prompt, said, sorted(forbidden))
        expected = next_token(logits[0], params, prompt, said, choice=choice, forbidden=forbidden)
        assert sample(logits, [row])[0].token_id == expected
    assert torch.equal(logits, before)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_equal_a_plain_reference_whatever_shapes_the_choice(num_top):
    logits = 4 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(
        temperature=0.7, top_p=0.5, seed=9, num_logprobs=num_top, frequency_penalty=1.0, logit_bias=((4, 9.0),)
    )
    token = sample(logits, [SampleRow(0, params, 0, 2, [1], [4, 5], [6])])[0]
    expected = logprob_of(logits[0], token.token_id, num_top)
    assert token.logprob.token_id == expected.token_id
    assert token.logprob.logprob == pytest.approx(expected.logprob, abs=1e-5)
    assert [entry[0] for entry in token.logprob.top] == [entry[0] for entry in expected.top]
    assert [entry[1] for entry in token.logprob.top] == pytest.approx([entry[1] for entry in expected.top], abs=1e-5)
