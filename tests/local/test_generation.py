"""From tokens to text, and how a run ends. If these fail, a stop string leaks into a reply, a stream differs from the
whole reply, or every finished request looks to the router like one that still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import deployments.generation
from deployments.generation import Delta, Generation, Prepared, Timeline
from epd.errors import DeadlineExceededError, StageFailedError
from epd.prompt.detokenizer import IncrementalDetokenizer
from epd.prompt.tokenizer import TextTokenizer
from epd.stages.life import LifeOptions
from epd.types import (
    FinishReason,
    Mode,
    Placement,
    Prefilled,
    Prompt,
    Request,
    SamplingParams,
    StageReport,
    TokenChunk,
    TokenLogprob,
)

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class Scripted:
    """A replica that streams given chunks, then ends as told, and notes how its stream was left."""

    def __init__(self, *items: tuple[TokenChunk, ...], end: Exception | None = None, hangs: bool = False) -> None:
        self.items = items
        self.end = end
        self.hangs = hangs
        self.was_read_to_the_end = self.was_closed = False

    async def decode(
        self, request: Request, source: Prompt | Prefilled, payloads: Mapping[int, bytes]
    ) -> AsyncGenerator[tuple[TokenChunk, ...]]:
        try:
            for chunks in self.items:
                yield chunks
            if self.hangs:
                await asyncio.Event().wait()
            if self.end is not None:
                raise self.end
            self.was_read_to_the_end = True
        finally:
            self.was_closed = True


@pytest.fixture(scope="module")
def tokenizer(tiny_qwen_dir: Path) -> TextTokenizer:
    return TextTokenizer(AutoTokenizer.from_pretrained(tiny_qwen_dir))


def generation(tokenizer: TextTokenizer, *, n: int = 1, stop: Sequence[str] = ()) -> Generation:
    request = Request("r", (1, 2, 3), SamplingParams(temperature=0.0, n=n, max_tokens=200))
    prepared = Prepared(request, {}, StageReport(), lambda: IncrementalDetokenizer(tokenizer, stop))
    return Generation(prepared, Timeline(0.0))


async def run(run: Generation, replica: Any, max_attempts: int = 1) -> dict[int, list[Delta]]:
    """Run to the end; return the deltas by choice."""
    placement = Placement(Mode.AGGREGATED, "r", "r")
    found: dict[int, list[Delta]] = {choice: [] for choice in range(run.prepared.request.sampling.n)}
    async for deltas in run.deltas(lambda *_: placement, lambda _: replica, options=LifeOptions(max_attempts)):
        for delta in deltas:
            found[delta.choice].append(delta)
    return found


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def chunks_of(token_ids: Sequence[int], sizes: Sequence[int], finish_reason: FinishReason) -> list[TokenChunk]:
    """Cut tokens into chunks of one choice; the last size may be more than there is."""
    cuts, start = [], 0
    for size in sizes:
        cuts.append(tuple(token_ids[start : start + size]))
        start += size
    chunks = [TokenChunk(0, cut) for cut in cuts[:-1]]
    return [*chunks, TokenChunk(0, cuts[-1], finish_reason)]


async def test_a_stop_string_over_several_chunks_never_shows_and_ends_the_run(tokenizer: TextTokenizer):
    token_ids = tokenizer.encode("one two three four five")
    whole = "one two three four five"
    for size in range(1, len(token_ids)):
        cuts = [size] * (len(token_ids) // size) + [size]
        replica = Scripted(*((chunk,) for chunk in chunks_of(token_ids, cuts, LENGTH)))
        one = generation(tokenizer, stop=["ee f"])
        (deltas,) = (await run(one, replica)).values()
        assert text_of(deltas) == whole[: whole.index("ee f")]
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [STOP]
        assert one.num_output_tokens == sum(delta.num_tokens for delta in deltas) <= len(token_ids)


async def test_the_token_that_stopped_a_choice_counts_and_does_not_show(tokenizer: TextTokenizer):
    token_ids = tuple(tokenizer.encode("one two"))
    marked = (*token_ids, *tokenizer.encode("!"))
    one = generation(tokenizer)
    (deltas,) = (await run(one, Scripted((TokenChunk(0, marked, STOP),)))).values()
    assert text_of(deltas) == "one two"
    assert one.num_output_tokens == len(marked)


async def test_logprobs_end_with_the_token_that_completed_the_stop_string(tokenizer: TextTokenizer):
    token_ids = tuple(tokenizer.encode("one two three"))
    entries = tuple(TokenLogprob(token_id, -1.0) for token_id in token_ids)
    one = generation(tokenizer, stop=["two"])
    (deltas,) = (await run(one, Scripted((TokenChunk(0, token_ids, LENGTH, entries),)))).values()
    assert len(deltas[0].logprobs) == deltas[0].num_tokens == one.num_output_tokens < len(token_ids)


async def test_choices_end_one_by_one_and_nothing_is_shown_of_one_that_was_stopped(tokenizer: TextTokenizer):
    first, second = tuple(tokenizer.encode("one two three")), tuple(tokenizer.encode("four"))
    replica = Scripted(
        (TokenChunk(0, first), TokenChunk(1, second)),
        (TokenChunk(0, first), TokenChunk(1, second)),
        (TokenChunk(0, first, LENGTH), TokenChunk(1, second, LENGTH)),
    )
    found = await run(generation(tokenizer, n=2, stop=["two"]), replica)
    assert text_of(found[0]) == "one "
    assert text_of(found[1]) == "fourfourfour"
    assert [found[choice][-1].finish_reason for choice in (0, 1)] == [STOP, LENGTH]
    assert replica.was_read_to_the_end  # the replica had ended both by itself


async def test_tokens_of_one_choice_that_come_together_are_one_gain(tokenizer: TextTokenizer):
    """Clients look at the first entry of an event only."""
    one, two = tuple(tokenizer.encode("one two")), tuple(tokenizer.encode(" three"))
    entries = tuple(TokenLogprob(token_id, -1.0) for token_id in one + two)
    replica = Scripted(
        (
            TokenChunk(0, one, None, entries[: len(one)]),
            TokenChunk(1, two),
            TokenChunk(0, two, LENGTH, entries[len(one) :]),
            TokenChunk(1, one, LENGTH),
        )
    )
    found = await run(generation(tokenizer, n=2), replica)
    assert [delta.text for delta in found[0]] == ["one two three"]
    assert found[0][0].logprobs == entries
    assert [delta.text for delta in found[1]] == [" threeone two"]
    assert [found[choice][0].finish_reason for choice in (0, 1)] == [LENGTH, LENGTH]


@pytest.mark.parametrize("stop", [(), ("one",)])
async def test_a_run_that_ends_by_itself_is_read_to_its_end_and_a_stopped_one_is_cut_off(
    tokenizer: TextTokenizer, stop: tuple[str, ...]
):
    token_ids = tuple(tokenizer.encode("one two"))
    replica = Scripted((TokenChunk(0, token_ids),), (TokenChunk(0, token_ids, LENGTH),))
    one = generation(tokenizer, stop=stop)
    await run(one, replica)
    assert one.is_complete
    assert replica.was_closed
    assert replica.was_read_to_the_end is not bool(stop)


@pytest.mark.parametrize("error", [StageFailedError("decode", "died"), DeadlineExceededError("too late")])
async def test_what_fails_after_the_last_token_fails_nobody(tokenizer: TextTokenizer, error: Exception):
    replica = Scripted((TokenChunk(0, tuple(tokenizer.encode("one")), LENGTH),), end=error)
    one = generation(tokenizer)
    (deltas,) = (await run(one, replica)).values()
    assert text_of(deltas) == "one"
    assert one.is_complete


async def test_a_stream_that_never_ends_after_its_last_token_is_left(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(deployments.generation, "END_TIMEOUT_S", 0.0)
    replica = Scripted((TokenChunk(0, tuple(tokenizer.encode("one")), LENGTH),), hangs=True)
    (deltas,) = (await run(generation(tokenizer), replica)).values()
    assert text_of(deltas) == "one"
    assert replica.was_closed


async def test_a_failure_amid_the_tokens_is_raised(tokenizer: TextTokenizer):
    replica = Scripted((TokenChunk(0, tuple(tokenizer.encode("one"))),), end=DeadlineExceededError("too late"))
    one = generation(tokenizer)
    with pytest.raises(DeadlineExceededError):
        await run(one, replica)
    assert not one.is_complete
