"""Every mode gives the tokens of `transformers` `generate`: without this a user cannot trust any placement.

Real encoders, engines and transfers over several replicas in one process, against the reference model on the same
checkpoint. Fails if a replica puts another token at another position, loses a rotary delta, mixes up blocks, or
answers here than elsewhere.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from epd.config import EngineConfig
from epd.transfer.factory import resolve_backend
from epd.types import Mode, Stage, StageReport, TokenChunk
from tests.in_process import InProcessCluster, Prompt, in_process_cluster, prompt_of_tokens, random_image, until
from tests.reference import (
    CASES,
    CHECKPOINTS,
    GREEDY,
    build,
    build_parts,
    checkpoint,
    expected_tokens,
    family_of,
    generated,
    model_of,
    num_shared_tokens,
)

BACKENDS = sorted({"by_reference", resolve_backend("auto")})
MODES = [Mode.AGGREGATED, Mode.E_PD, Mode.EP_D, Mode.EPD]
BLOCK_SIZE = 16


def block_bytes(block_size: int) -> int:
    """Size of a KV block of the tiny checkpoint."""
    config = model_of("tiny").config.text_config
    head_dim = config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4 * block_size


def total(chunks: Sequence[TokenChunk]) -> StageReport:
    return sum((chunk.report for chunk in chunks if chunk.report is not None), StageReport())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CHECKPOINTS)
async def test_tokens_equal_generate_in_every_mode(name, backend):
    async with in_process_cluster(checkpoint(name), backend=backend) as cluster:
        for case in CASES:
            prompt = build(name, case)
            for mode in MODES:
                tokens, _ = await cluster.run(prompt.request, prompt.payloads, mode)
                assert tuple(tokens[0]) == expected_tokens(name, case), f"{case}, {mode}"
        await cluster.check_integrity()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CHECKPOINTS)
async def test_tokens_equal_generate_in_a_mixed_batch_of_28(name, backend):
    async with in_process_cluster(checkpoint(name), backend=backend) as cluster:
        cases = [(case, mode) for case in CASES for mode in MODES]
        runs = [cluster.run(build(name, case).request, build(name, case).payloads, mode) for case, mode in cases]
        for (case, mode), (tokens, _) in zip(cases, await asyncio.gather(*runs), strict=True):
            assert tuple(tokens[0]) == expected_tokens(name, case), f"{case}, {mode}"
        await cluster.check_integrity()


@pytest.mark.parametrize("mode", MODES)
async def test_tokens_equal_generate_when_a_chunk_is_smaller_than_an_image(mode):
    engine = EngineConfig(kv_cache_bytes=8 * 2**20, num_threads=1, max_num_batched_tokens=5, max_num_seqs=4)
    async with in_process_cluster(checkpoint("tiny"), engine=engine) as cluster:
        for case in CASES:
            prompt = build("tiny", case)
            tokens, _ = await cluster.run(prompt.request, prompt.payloads, mode)
            assert tuple(tokens[0]) == expected_tokens("tiny", case), case
        await cluster.check_integrity()


@pytest.mark.parametrize("mode", MODES)
async def test_tokens_equal_generate_after_a_preemption(mode):
    """Blocks for less than the running requests need: the youngest is computed again, or resumes elsewhere."""
    num_tokens = 40
    cases = ["one image", "three images of different sizes", "adjacent images", "no image"]
    decode = "d" if mode.splits_decode else "all"
    longest = build("tiny", "three images of different sizes").request.num_prompt_tokens + num_tokens
    num_blocks = -(-longest // 4) + 12
    engines = {decode: EngineConfig(block_size=4, kv_cache_bytes=num_blocks * block_bytes(4), num_threads=1)}
    roomy = EngineConfig(block_size=4, kv_cache_bytes=8 * 2**20, num_threads=1)
    async with in_process_cluster(checkpoint("tiny"), engine=roomy, engines=engines) as cluster:
        worker = cluster.workers[decode]
        is_open = threading.Event()
        worker.engine_thread.post(lambda engine: is_open.wait(60))
        prompts = [build("tiny", case, max_tokens=num_tokens) for case in cases]
        runs = [asyncio.create_task(cluster.run(prompt.request, prompt.payloads, mode)) for prompt in prompts]
        await until(lambda: worker.stats().running_requests[Stage.DECODE] == len(cases))
        is_open.set()
        for case, (tokens, chunks) in zip(cases, await asyncio.gather(*runs), strict=True):
            assert tuple(tokens[0]) == expected_tokens("tiny", case, num_tokens), case
            # What a request finds of its own when it starts again does not make its prompt a cached one.
            others = [build("tiny", other).request for other in cases if other != case]
            num_shared = max(num_shared_tokens(build("tiny", case).request, other) for other in others)
            assert total(chunks).cached["prefix_tokens"] <= num_shared
        assert worker.stats().preemptions > 0
        await cluster.check_integrity()


# -- prefix cache: what a warm replica saves, and what it says of it ---------------------------------------------------

INTRO = "The quick brown fox jumps over the lazy dog, and the green bird sings in the tree. "
IMAGE, OTHER_IMAGE = random_image(1, 112, 84), random_image(20, 112, 84)
FIRST = [INTRO, IMAGE, "What color is the circle?"]
SECOND = {
    "only the text before another image": [INTRO, OTHER_IMAGE, "What color is the circle?"],
    "text and image": [INTRO, IMAGE, "How many shapes are there?"],
    "everything": FIRST,
    "nothing": [IMAGE, "Count from one to ten: one, two, three"],
}


async def run_reported(cluster: InProcessCluster, prompt: Prompt, mode: Mode) -> StageReport:
    """Run a prompt, compare its tokens, and return what its stages said of it."""
    tokens, chunks = await cluster.run(prompt.request, prompt.payloads, mode)
    assert tuple(tokens[0]) == generated("tiny", prompt)
    return total(chunks)


@pytest.mark.parametrize("shared", SECOND)
@pytest.mark.parametrize("mode", MODES)
async def test_a_warm_cluster_reports_and_moves_what_is_true(mode, shared):
    """Cached tokens are 0 when cold and whole shared blocks when warm; a decode replica fetches what it lacks."""
    first, second = build_parts("tiny", FIRST), build_parts("tiny", SECOND[shared], is_bare=shared == "nothing")
    num_prompt = second.request.num_prompt_tokens
    num_shared = num_shared_tokens(first.request, second.request)
    async with in_process_cluster(checkpoint("tiny")) as cluster:
        cold = await run_reported(cluster, first, mode)
        assert cold.cached["prefix_tokens"] == 0
        warm = await run_reported(cluster, second, mode)
        # The last token of a prompt is always computed: its logits choose the first token of the output.
        assert warm.cached["prefix_tokens"] == min(num_shared, num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert (warm.cached["prefix_tokens"] > 0) == (shared != "nothing")
        if mode.splits_decode:
            num_first, num_second = (-(-each.request.num_prompt_tokens // BLOCK_SIZE) for each in (first, second))
            assert cold.transferred_bytes["kv"] == num_first * block_bytes(BLOCK_SIZE)
            num_missing = num_second - num_shared // BLOCK_SIZE
            assert warm.transferred_bytes["kv"] == num_missing * block_bytes(BLOCK_SIZE)
        else:
            assert "kv" not in cold.transferred_bytes | warm.transferred_bytes
        await cluster.check_integrity()


@pytest.mark.parametrize("mode", MODES)
async def test_the_next_turn_of_a_conversation_finds_what_was_decoded(mode):
    """A decode replica has the first answer in its blocks, and fetches only what follows."""
    first = build("tiny", "no image", max_tokens=40)
    async with in_process_cluster(checkpoint("tiny")) as cluster:
        tokens, _ = await cluster.run(first.request, {}, mode)
        turn = [*first.request.prompt_token_ids, *tokens[0], *first.request.prompt_token_ids]
        second = prompt_of_tokens(family_of("tiny"), turn, [], sampling=GREEDY)
        report = await run_reported(cluster, second, mode)
        num_prompt, num_computed = first.request.num_prompt_tokens, first.request.num_prompt_tokens + len(tokens[0]) - 1
        prefilled = num_prompt if mode.splits_decode else num_computed
        assert report.cached["prefix_tokens"] == prefilled // BLOCK_SIZE * BLOCK_SIZE
        if mode.splits_decode:
            num_missing = -(-len(turn) // BLOCK_SIZE) - num_computed // BLOCK_SIZE
            assert report.transferred_bytes["kv"] == num_missing * block_bytes(BLOCK_SIZE)
        await cluster.check_integrity()


@pytest.mark.parametrize("mode", [Mode.EP_D, Mode.EPD])
async def test_a_decode_replica_that_is_warm_while_prefill_is_cold_fetches_what_it_lacks(mode):
    prompt = build_parts("tiny", FIRST)
    async with in_process_cluster(checkpoint("tiny")) as cluster:
        await run_reported(cluster, prompt, mode)
        cluster.workers["p"], original = cluster.workers["all"], cluster.workers["p"]
        try:
            report = await run_reported(cluster, prompt, mode)
        finally:
            cluster.workers["p"] = original
        assert report.cached["prefix_tokens"] == 0
        num_prompt = prompt.request.num_prompt_tokens
        num_missing = -(-num_prompt // BLOCK_SIZE) - num_prompt // BLOCK_SIZE
        assert report.transferred_bytes["kv"] == num_missing * block_bytes(BLOCK_SIZE)
        await cluster.check_integrity()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("mode", MODES)
async def test_a_request_of_one_token_ends_at_prefill_and_leaves_nothing_behind(mode, n):
    prompt = build("tiny", "one image", max_tokens=1, n=n)
    async with in_process_cluster(checkpoint("tiny")) as cluster:
        tokens, chunks = await cluster.run(prompt.request, prompt.payloads, mode)
        assert tokens == {choice: [expected_tokens("tiny", "one image")[0]] for choice in range(n)}
        assert "kv" not in total(chunks).transferred_bytes
        if mode.splits_decode:
            assert cluster.workers["d"].stats().stage_requests[Stage.DECODE] == 0
        await cluster.check_integrity()


async def test_requests_differing_only_in_sampling_share_their_prefix():
    prompt = build_parts("tiny", FIRST)
    async with in_process_cluster(checkpoint("tiny")) as cluster:
        await cluster.run(prompt.request, prompt.payloads, Mode.AGGREGATED)
        sampled = replace(prompt.request, sampling=replace(GREEDY, temperature=1.0, seed=3))
        _, chunks = await cluster.run(sampled, prompt.payloads, Mode.AGGREGATED)
        assert total(chunks).cached["prefix_tokens"] > 0
