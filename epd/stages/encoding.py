"""Encoding on one replica: uploaded bytes to cached embeddings, batched over requests.

Owns the preprocessing threads, the encoder's thread and the replica's embedding cache. An item that is already cached,
or on its way for another request, is not computed again. Knows nothing of handles, engines or placement.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from epd.cache.embedding_cache import EmbeddingCache
from epd.errors import EpdError, StageFailedError
from epd.transfer.slab import wait_for_device
from epd.types import Embedding, Encoder, MediaItem, StageReport

if TYPE_CHECKING:
    from PIL import Image

DecodeMedia = Callable[[MediaItem, bytes], "Sequence[Image.Image]"]


@dataclass(slots=True)
class _Waiting:
    """A preprocessed item in the encoder's queue."""

    item: MediaItem
    patches: torch.Tensor
    queued_s: float
    result: asyncio.Future[tuple[Embedding, StageReport]]


@dataclass(slots=True)
class _InFlight:
    """An item that is being made, for one or more requests."""

    task: asyncio.Task[tuple[Embedding, StageReport]]
    num_waiters: int = 0


@dataclass(slots=True)
class EncodeStats:
    num_items: int = 0
    num_hits: int = 0
    num_misses: int = 0
    encode_s: list[float] = field(default_factory=list)


class EncodeService:
    """See the module. All methods run on one event loop."""

    def __init__(
        self,
        encoder: Encoder,
        cache: EmbeddingCache,
        decode_media: DecodeMedia,
        *,
        max_batch_patches: int,
        num_preprocess_threads: int,
        num_threads: int | None = None,
        decode_timeout_s: float = 20.0,
    ) -> None:
        self.cache = cache
        self.stats = EncodeStats()
        self._encoder = encoder
        self._decode_media = decode_media
        self._decode_timeout_s = decode_timeout_s
        self._max_batch_patches = max_batch_patches

        def set_threads() -> None:
            if num_threads is not None:
                torch.set_num_threads(num_threads)

        self._preprocess_threads = ThreadPoolExecutor(num_preprocess_threads, "preprocess", initializer=set_threads)
        self._encode_thread = ThreadPoolExecutor(1, "encode", initializer=set_threads)
        self._in_flight: dict[str, _InFlight] = {}
        self._queue: list[_Waiting] = []
        self._num_running = 0
        self._runner: asyncio.Task[None] | None = None

    @property
    def num_queued_items(self) -> int:
        """Items accepted and not yet encoded, those still being decoded or preprocessed included."""
        return len(self._in_flight)

    @property
    def num_queued_patches(self) -> int:
        return sum(waiting.item.num_patches for waiting in self._queue)

    @property
    def num_running(self) -> int:
        """Items in the batch that the encoder is at."""
        return self._num_running

    async def warm_up(self, item: MediaItem, frames: Sequence[Image.Image]) -> None:
        """Encode an item for nothing, on the threads that will encode: neither cached nor counted."""
        loop = asyncio.get_running_loop()
        patches = await loop.run_in_executor(self._preprocess_threads, self._encoder.preprocess, item, frames)
        await loop.run_in_executor(self._encode_thread, self._encode, [item], [patches])

    async def obtain(self, item: MediaItem, payload: bytes) -> tuple[Embedding, StageReport]:
        """Return the item's embedding, with a reference in ``cache`` that the caller releases.

        Raises ``MediaError`` for bytes that cannot be decoded.
        """
        if (cached := self.cache.acquire(item.mm_hash)) is not None:
            self.stats.num_hits += 1
            return cached, StageReport(cached={"embedding_items": 1})
        self.stats.num_misses += 1
        flight = self._in_flight.get(item.mm_hash)
        if flight is None:
            flight = _InFlight(asyncio.create_task(self._make(item, payload)))
            self._in_flight[item.mm_hash] = flight
        flight.num_waiters += 1
        try:
            embedding, report = await asyncio.shield(flight.task)
        finally:
            flight.num_waiters -= 1
            if flight.num_waiters == 0 and not flight.task.done():
                flight.task.cancel()
        return self.cache.put(item.mm_hash, embedding), report

    async def _make(self, item: MediaItem, payload: bytes) -> tuple[Embedding, StageReport]:
        try:
            started_s = time.monotonic()
            patches = await self._preprocess(item, payload)
            preprocess_s = time.monotonic() - started_s
            waiting = _Waiting(item, patches, time.monotonic(), asyncio.get_running_loop().create_future())
            self._queue.append(waiting)
            if self._runner is None or self._runner.done():
                self._runner = asyncio.create_task(self._run_batches())
            embedding, report = await waiting.result
            return embedding, report + StageReport({"preprocess": preprocess_s})
        finally:
            del self._in_flight[item.mm_hash]

    async def _preprocess(self, item: MediaItem, payload: bytes) -> torch.Tensor:
        def run() -> torch.Tensor:
            return self._encoder.preprocess(item, self._decode_media(item, payload))

        future = asyncio.get_running_loop().run_in_executor(self._preprocess_threads, run)
        try:
            return await asyncio.wait_for(future, self._decode_timeout_s)
        except TimeoutError:
            raise StageFailedError(
                "encode", f"{item.param}: decoding took longer than {self._decode_timeout_s:g} s"
            ) from None

    async def _run_batches(self) -> None:
        while self._queue:
            batch = self._take_batch()
            if not batch:
                continue
            started_s = time.monotonic()
            self._num_running = len(batch)
            try:
                embeddings = await asyncio.get_running_loop().run_in_executor(
                    self._encode_thread,
                    self._encode,
                    [waiting.item for waiting in batch],
                    [waiting.patches for waiting in batch],
                )
            except Exception as error:  # the encoder's failure is that of the requests in the batch, not of the service
                failure = error if isinstance(error, EpdError) else StageFailedError("encode", repr(error))
                for waiting in batch:
                    if not waiting.result.done():
                        waiting.result.set_exception(failure)
                continue
            finally:
                self._num_running = 0
            ended_s = time.monotonic()
            self.stats.num_items += len(batch)
            self.stats.encode_s.append(ended_s - started_s)
            for waiting, embedding in zip(batch, embeddings, strict=True):
                report = StageReport({"encode_queue": started_s - waiting.queued_s, "encode": ended_s - started_s})
                if not waiting.result.done():
                    waiting.result.set_result((embedding, report))

    def _encode(self, items: Sequence[MediaItem], patches: Sequence[torch.Tensor]) -> list[Embedding]:
        embeddings = self._encoder.encode(items, patches)
        for embedding in embeddings:
            wait_for_device(embedding.values)  # what is reported is how long it took, not how long it took to queue
        return embeddings

    def _take_batch(self) -> list[_Waiting]:
        """Take from the queue, oldest first, what fits one batch; at least one item. Cancelled items are dropped."""
        self._queue = [waiting for waiting in self._queue if not waiting.result.done()]
        batch: list[_Waiting] = []
        num_patches = 0
        while self._queue and (not batch or num_patches + self._queue[0].item.num_patches <= self._max_batch_patches):
            waiting = self._queue.pop(0)
            num_patches += waiting.item.num_patches
            batch.append(waiting)
        return batch

    async def close(self) -> None:
        """Cancel what is under way and end the threads."""
        tasks = [flight.task for flight in self._in_flight.values()]
        if self._runner is not None:
            tasks.append(self._runner)  # type: ignore[arg-type]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._preprocess_threads.shutdown(wait=False, cancel_futures=True)
        self._encode_thread.shutdown(wait=False, cancel_futures=True)
