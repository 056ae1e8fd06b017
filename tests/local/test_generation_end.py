"""How a run ends: if these fail, every finished request looks to the router like one that still runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from deployments.generation import Generation, Prepared, Timeline
from epd.prompt.detokenizer import IncrementalDetokenizer
from epd.prompt.tokenizer import TextTokenizer
from epd.testing import FakeStageWorker
from epd.transfer.in_process import InProcessPeers
from epd.types import Mode, Placement, Prefilled, Prompt, Request, SamplingParams, Stage, StageReport, TokenChunk


class Watched(FakeStageWorker):
    """Notes whether its stream was read to the end or closed before."""

    was_read_to_the_end = False

    async def decode(
        self, request: Request, source: Prompt | Prefilled, payloads: Mapping[int, bytes]
    ) -> AsyncGenerator[tuple[TokenChunk, ...]]:
        async for chunks in super().decode(request, source, payloads):
            yield chunks
        self.was_read_to_the_end = True


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_run_that_ends_by_itself_is_read_to_its_end_and_a_stopped_one_is_cut_off(tiny_qwen_dir, n, is_stopped):
    worker = Watched("r", "all", list(Stage), InProcessPeers())
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(tiny_qwen_dir))
    token_ids = tuple(tokenizer.encode("one two three four"))
    stop = ("two",) if is_stopped else ()
    request = Request("r", token_ids, SamplingParams(temperature=0.0, n=n, max_tokens=200))
    prepared = Prepared(request, {}, StageReport(), lambda: IncrementalDetokenizer(tokenizer, stop))
    generation = Generation(prepared, replace(Timeline(0.0)))
    stream = generation.deltas(
        lambda part, excluded: Placement(Mode.AGGREGATED, "r", "r"), lambda replica_id: worker, max_attempts=1
    )
    text = "".join([delta.text async for deltas in stream for delta in deltas if delta.choice == 0])
    assert generation.is_complete
    assert worker.was_read_to_the_end is not is_stopped
    assert ("two" in text) is not is_stopped
    await worker.check_integrity()
