"""What a replica does before it says that it is ready: each phase timed and logged, and first runs of the usual shapes.

Kernels, libraries and allocators set themselves up on first use; without this the first requests would pay for it.
Knows nothing of queues: the runner is given sequences made up for the purpose, over blocks that nobody holds yet.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from epd.cache.kv_cache import KVCache
from epd.engine.model_runner import Runner
from epd.engine.sampler import SampleRow, sample
from epd.engine.sequence import EngineSequence, RequestState
from epd.types import Request, RotaryPositions, SamplingParams

_LOG = logging.getLogger(__name__)

CACHE_DIR_VARIABLE = "EPD_CACHE_DIR"
"""Names the directory of built kernels to ``epd.engine.native``."""

_PROMPT_TOKENS = 64
_BATCH_SIZES = (1, 4, 16)


@contextlib.contextmanager
def phase(replica_id: str, what: str, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Log how long a phase of the start took. One that fails is not logged: its error says more."""
    started_s = clock()
    yield
    _LOG.info("start of %s: %s took %.3f s", replica_id, what, clock() - started_s)


def use_cache_dir(directory: str | None) -> None:
    """Keep compiled kernels in ``directory``; with ``None``, where the environment says, or in the user's cache."""
    if directory is not None:
        os.environ[CACHE_DIR_VARIABLE] = str(Path(directory).expanduser())


def warm_up(runner: Runner, kv_cache: KVCache, *, max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Run a prompt, the second half of one, and decodes of a few batch sizes; and draw tokens from what comes out.

    Nobody may hold a block. Those that were written are zero again afterwards, and nothing is counted or remembered.
    """
    num_tokens = min(_PROMPT_TOKENS, max_num_batched_tokens, kv_cache.num_blocks * kv_cache.block_size - 1)
    if num_tokens < 1:
        return
    block_table = list(range(-(-(num_tokens + 1) // kv_cache.block_size)))
    prompt = _sequence(num_tokens, 0, block_table)
    _run(runner, {prompt: num_tokens})
    if num_tokens > 1:
        _run(runner, {_sequence(num_tokens, num_tokens // 2, block_table): num_tokens - num_tokens // 2})
    for batch_size in sorted({min(size, max_num_seqs) for size in _BATCH_SIZES}):
        _run(runner, {_sequence(num_tokens + 1, num_tokens, block_table): 1 for _ in range(batch_size)})
    kv_cache.blocks[: len(block_table)].zero_()


def _run(runner: Runner, num_tokens: dict[EngineSequence, int]) -> None:
    """Run a step as a greedy and as a sampling request would: their results leave the device in different ways."""
    sequences = list(num_tokens)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, top_p=0.9)
        logits = runner.start(num_tokens, sequences, params.is_greedy).wait()
        rows = [SampleRow(row=index, params=params, choice=0, position=0) for index in range(len(sequences))]
        sample(logits.values, rows, logits.greedy_ids)


def _sequence(num_tokens: int, num_computed_tokens: int, block_table: list[int]) -> EngineSequence:
    """Make a sequence up, all of it prompt but for the last token if that alone is left to compute."""
    num_prompt = num_tokens - 1 if num_tokens - num_computed_tokens == 1 else num_tokens
    request = Request("warm-up", (0,) * num_prompt, SamplingParams(temperature=0.0))
    positions = np.broadcast_to(np.arange(num_prompt, dtype=np.int64), (3, num_prompt))
    state = RequestState(request, RotaryPositions(positions, 0), arrival=0)
    return EngineSequence(state, 0, [0] * num_tokens, num_computed_tokens, list(block_table))
