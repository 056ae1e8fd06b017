"""What every model runner must compute, on whatever device: the logits of one plain forward pass over given tokens.

The tokens are fixed, so that rounding changes no choice and half precision can be held to the same reference. Prompts
start one after another, so that steps mix chunks with decodes, and end as decodes alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch

from epd.cache.kv_cache import KVCache
from epd.engine.model_runner import Runner
from epd.engine.sequence import EngineSequence, RequestState
from tests.in_process import Prompt, prompt_of_tokens
from tests.reference import GREEDY, build, embeddings_of, family_of, logits_of, tokenizer_of

NAME = "tiny"
CASES = ("no image", "one image", "three images of different sizes", "long")
NUM_OUTPUT_TOKENS = 6
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest error of a logit, as a share of the largest logit in half precision."""


@dataclass
class ForcedSequence:
    """A sequence that is told its output, and the logits that it would have chosen by."""

    case: str
    sequence: EngineSequence
    output: list[int]
    starts_at_step: int
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.logits) == NUM_OUTPUT_TOKENS

    def next_tokens(self, step: int, chunk: int) -> int:
        sequence = self.sequence
        if step < self.starts_at_step or self.is_done:
            return 0
        return min(chunk, sequence.num_tokens - sequence.num_computed_tokens)

    def take(self, row: torch.Tensor) -> None:
        self.sequence.token_ids.append(self.output[len(self.logits)])
        self.logits.append(row.clone())


@cache
def prompt_of(case: str) -> Prompt:
    if case != "long":
        return build(NAME, case)
    words = "several words that are long enough to fill more than one block of 256 tokens, again and again: " * 6
    return prompt_of_tokens(family_of(NAME), tokenizer_of(NAME).encode(words), [], sampling=GREEDY)


def output_of(case: str) -> list[int]:
    generator = torch.Generator().manual_seed(len(case))
    return torch.randint(10, 300, (NUM_OUTPUT_TOKENS,), generator=generator).tolist()


@cache
def reference_logits(case: str) -> torch.Tensor:
    return logits_of(NAME, prompt_of(case), output_of(case))


def check_logits(runner: Runner, kv_cache: KVCache, *, chunk: int) -> None:
    """Assert that all cases, run together in chunks of so many tokens, get the logits of a plain forward pass."""
    forced = _forced_sequences(kv_cache)
    step = 0
    while not all(one.is_done for one in forced):
        counts = [(one, one.next_tokens(step, chunk)) for one in forced]
        counts = sorted((entry for entry in counts if entry[1]), key=lambda entry: entry[1] > 1)
        complete = [one for one, count in counts if one.sequence.num_computed_tokens + count == one.sequence.num_tokens]
        num_tokens = {one.sequence: count for one, count in counts}
        logits = runner.start(num_tokens, [one.sequence for one in complete], False).wait()
        for sequence, count in num_tokens.items():
            sequence.num_computed_tokens += count
        for one, row in zip(complete, logits.values, strict=True):
            one.take(row)
        step += 1
    for one in forced:
        _check(one, kv_cache.blocks.dtype)


def _check(one: ForcedSequence, dtype: torch.dtype) -> None:
    reference = reference_logits(one.case)
    scale = 1.0 if dtype is torch.float32 else float(reference.abs().max())
    error = float((torch.stack(one.logits) - reference).abs().max()) / scale
    assert error < TOLERANCE[dtype], f"{one.case}: logits are off by {error:.2g}"


def _forced_sequences(kv_cache: KVCache) -> list[ForcedSequence]:
    """One sequence a case, over blocks in no particular order."""
    order = torch.randperm(kv_cache.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    forced = []
    for index, case in enumerate(CASES):
        prompt = prompt_of(case)
        rotary = family_of(NAME).rotary_positions(prompt.request)
        state = RequestState(prompt.request, rotary, arrival=index, embeddings=[*embeddings_of(NAME, prompt)])
        num_blocks = -(-(prompt.request.num_prompt_tokens + NUM_OUTPUT_TOKENS) // kv_cache.block_size)
        blocks, order = order[:num_blocks], order[num_blocks:]
        sequence = EngineSequence(state, 0, list(prompt.request.prompt_token_ids), block_table=blocks)
        forced.append(ForcedSequence(case, sequence, output_of(case), starts_at_step=2 * index))
    return forced


def num_blocks_needed(block_size: int) -> int:
    return sum(-(-(prompt_of(case).request.num_prompt_tokens + NUM_OUTPUT_TOKENS) // block_size) for case in CASES)
