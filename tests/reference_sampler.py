"""What one draw should be, in float64 and step by step: `transformers`' own logits processors where it has them.

Knows nothing of the sampler under test but the noise, which is its definition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from epd.engine.sampler import uniform_noise
from epd.types import SamplingParams, TokenLogprob


def processed(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    forbidden: Collection[int] = (),
) -> torch.Tensor:
    """Return float64 scores ``[vocab_size]`` that the next token is chosen by; ``-inf`` where it cannot be."""
    seen = torch.tensor([[*prompt, *output]], dtype=torch.int64)
    scores = logits.double()[None]
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(seen, scores)
    scores = scores.clone()
    for token_id, count in Counter(output).items():
        scores[0, token_id] -= params.presence_penalty + params.frequency_penalty * count
    for token_id, bias in params.logit_bias:
        scores[0, token_id] += bias
    for token_id in forbidden:
        scores[0, token_id] = -torch.inf
    if params.is_greedy:
        return scores[0]
    scores = TemperatureLogitsWarper(params.temperature)(seen, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(seen, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(seen, scores)
    if params.min_p > 0.0:
        scores = MinPLogitsWarper(params.min_p)(seen, scores)
    return scores[0]


def next_token(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    choice: int = 0,
    forbidden: Collection[int] = (),
) -> int:
    """Return the token that a seeded request draws after ``output``, or the best one where it does not sample."""
    scores = processed(logits, params, prompt, output, forbidden)
    if params.is_greedy:
        return int(scores.argmax())
    noise = uniform_noise(params.seed, choice, len(output))
    mass = 0.0
    for token_id, probability in enumerate(scores.softmax(-1).tolist()):
        mass += probability
        if noise < mass:
            return token_id
    raise AssertionError("probabilities do not add up to more than the noise")


def logprob_of(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """Return what a reply says of a token: the model's own probabilities, whatever shaped the choice."""
    logprobs = logits.double().log_softmax(-1)
    values, ids = logprobs.sort(descending=True, stable=True)
    top = tuple(zip(ids[:num_top].tolist(), values[:num_top].tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), top)
