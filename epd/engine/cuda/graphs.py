"""Decode steps recorded once for each batch size, and replayed: one launch in place of hundreds.

Owns the memory that the recorded steps read and write. What records and replays is handed in, so that all but CUDA's
own capture can be tested on any device. Knows nothing of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from epd.engine.cuda.inputs import empty_decode_arrays
from epd.engine.cuda.staging import Array, Uploads, packed_bytes

DecodeStep = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""Runs the model over ``decode_arrays`` on the device; returns float32 logits ``[bucket, vocab_size]``."""

_NUM_TRIAL_RUNS = 2
"""Runs before a capture, in which libraries set up what they may not set up during one."""


class Recorder(Protocol):
    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run a function that only queues work on the device; return what queues the same work again.

        It must read and write the same memory each time, and must not wait for the device.
        """
        ...


class CudaRecorder:
    """Captures CUDA graphs, which share one pool of memory: no two of them run at once."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_NUM_TRIAL_RUNS):
                function()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile (an encoder warming up): their calls must not end the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        replay: Callable[[], None] = graph.replay
        return replay


class DecodeGraphs:
    """One recorded step a bucket. Inputs are static memory of each bucket; outputs, of the largest, serve all."""

    def __init__(self, step: DecodeStep, recorder: Recorder, *, vocab_size: int, max_blocks: int, device: str) -> None:
        self._step = step
        self._recorder = recorder
        self._vocab_size = vocab_size
        self._max_blocks = max_blocks
        self._device = device
        self._replays: dict[int, Callable[[], None]] = {}
        self._memory: dict[int, torch.Tensor] = {}
        self._logits = torch.empty(0)
        self._greedy_ids = torch.empty(0, dtype=torch.int64)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Batch sizes that were recorded, ascending."""
        return tuple(sorted(self._replays))

    def capture(self, buckets: tuple[int, ...], scratch_block: int) -> None:
        """Record a step of each batch size, the largest first: the smaller ones fit the pool that it leaves."""
        self._logits = torch.empty(max(buckets), self._vocab_size, dtype=torch.float32, device=self._device)
        self._greedy_ids = torch.empty(max(buckets), dtype=torch.int64, device=self._device)
        for bucket in sorted(buckets, reverse=True):
            arrays = empty_decode_arrays(bucket, max_blocks=self._max_blocks, scratch_block=scratch_block)
            memory = torch.empty(packed_bytes(arrays), dtype=torch.uint8, device=self._device)
            tensors = Uploads(self._device).send(arrays, memory)
            self._memory[bucket] = memory
            self._replays[bucket] = self._recorder.record(self._recordable(bucket, tensors))

    def _recordable(self, bucket: int, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            logits = self._step(tensors)
            self._logits[:bucket].copy_(logits)
            self._greedy_ids[:bucket].copy_(logits.argmax(dim=-1))

        return run

    def replay(self, bucket: int, arrays: Mapping[str, Array], uploads: Uploads) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the step of a bucket over new inputs; return its logits and most likely ids, rows of padding included.

        They are overwritten by the next replay.
        """
        uploads.send(arrays, self._memory[bucket])
        self._replays[bucket]()
        return self._logits[:bucket], self._greedy_ids[:bucket]
