"""From logits to tokens: penalties, temperature, truncation, and noise that depends on the request alone.

The noise of one draw is a hash of (seed, choice, output position), so the same request gives the same tokens wherever
and beside whomever it runs, and nothing but the seed has to travel between replicas (counter-based random numbers:
Salmon et al., SC 2011; the mixer is SplitMix64, Steele et al., OOPSLA 2014). A draw inverts the cumulative
distribution over the vocabulary. Knows nothing of schedulers or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from epd.types import SamplingParams, TokenLogprob

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One token to draw: from row ``row`` of the logits, for output position ``position`` of ``choice``.

    ``forbidden_ids`` cannot be drawn (end tokens before ``min_tokens``).
    """

    row: int
    params: SamplingParams
    choice: int
    position: int
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    forbidden_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: TokenLogprob | None = None


def uniform_noise(seed: int, choice: int, position: int) -> float:
    """Return a uniform number in [0, 1) that depends on nothing but the arguments."""
    state = seed & _MASK
    for word in (choice, position):
        state = _mix((state + 0x9E3779B97F4A7C15 * (word + 1)) & _MASK)
    return (state >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def sample(
    logits: torch.Tensor, rows: Sequence[SampleRow], greedy_ids: Sequence[int] | None = None
) -> list[SampledToken]:
    """Draw one token for each row. ``logits`` is float32 ``[num_logit_rows, vocab_size]`` and is not changed.

    ``greedy_ids``, the most likely token of each row of the logits, spares looking for it where it is known.
    """
    if greedy_ids is None:
        greedy_ids = logits.argmax(dim=-1).tolist() if any(map(is_plain_greedy, rows)) else []
    return [
        SampledToken(greedy_ids[row.row]) if is_plain_greedy(row) else _sample_row(logits[row.row], row) for row in rows
    ]


def is_plain_greedy(row: SampleRow) -> bool:
    """Whether a row gets the most likely token, whatever the other numbers are."""
    params = row.params
    return (
        params.is_greedy
        and not row.forbidden_ids
        and params.num_logprobs is None
        and not params.logit_bias
        and params.presence_penalty == params.frequency_penalty == 0.0
        and params.repetition_penalty == 1.0
    )


def _sample_row(logits: torch.Tensor, row: SampleRow) -> SampledToken:
    params = row.params
    adjusted = _adjust(logits, row)
    if params.is_greedy:
        token_id = int(adjusted.argmax())
    else:
        noise = uniform_noise(params.seed, row.choice, row.position)
        token_id = _draw(_truncate(_cool(adjusted, params.temperature), params), noise)
    if params.num_logprobs is None:
        return SampledToken(token_id)
    return SampledToken(token_id, _logprob(logits, token_id, params.num_logprobs))


def _adjust(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """Apply penalties (as OpenAI and, for repetition, CTRL define them), bias and forbidden tokens to a copy."""
    params = row.params
    logits = logits.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt_token_ids, *row.output_token_ids}), dtype=torch.int64)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.output_token_ids:
        counts = torch.bincount(torch.tensor(list(row.output_token_ids)), minlength=logits.shape[0])
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    for token_id, bias in params.logit_bias:
        logits[token_id] += bias
    if row.forbidden_ids:
        logits[list(row.forbidden_ids)] = -torch.inf
    return logits


def _cool(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return float64 logits over the temperature, at most 0: so no temperature is too small to divide by."""
    return (logits.double() - logits.max()) / temperature


def _truncate(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return float64 weights after top-k, top-p (nucleus) and min-p, in that order."""
    probs = torch.softmax(logits, dim=-1)
    if 0 < params.top_k < probs.shape[0]:
        threshold = probs.topk(params.top_k).values[-1]
        probs = torch.where(probs >= threshold, probs, 0.0)
    if params.top_p < 1.0:
        ordered, order = probs.sort(descending=True)
        mass_before = ordered.cumsum(0) - ordered
        probs = probs.index_fill(0, order[mass_before >= params.top_p * ordered.sum()], 0.0)
    if params.min_p > 0.0:
        probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
    return probs


def _draw(weights: torch.Tensor, noise: float) -> int:
    cumulative = weights.cumsum(0)
    index = int(torch.searchsorted(cumulative, noise * float(cumulative[-1]), right=True))
    # Rounding can put the target at the very end; the last token with any weight is then the answer.
    return min(index, int(weights.nonzero()[-1]))


def _logprob(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """Log probabilities of the model itself, before penalties and temperature."""
    logprobs = torch.log_softmax(logits, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, ids = logprobs.topk(num_top)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), top)
