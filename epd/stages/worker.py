"""What a replica does in its roles: encode, prefill, decode, and the memory it lends to other replicas.

Composes the encoder, the engine and the connectors behind the ``StageClient`` protocol; a replica without the encode
role holds no vision tower, and one with nothing but the encode role holds no language model and no KV cache. Fused
stages share this object: an embedding goes from the encoder to the engine through the embedding cache, and the blocks
of a request that decodes where it was prefilled never leave its block table. Knows nothing of Ray, HTTP or text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from epd.cache.embedding_cache import EmbeddingCache, HeldEmbeddings
from epd.config import EngineConfig, MediaConfig, ModelConfig, TransferConfig
from epd.engine.engine import PrefillDone
from epd.engine.engine_thread import EngineThread, RequestStream
from epd.errors import (
    ConfigError,
    MediaError,
    StageFailedError,
    TransferError,
)
from epd.media.decode import decode_image, decode_video
from epd.stages.data_plane import DataPlane
from epd.stages.encoding import EncodeService
from epd.stages.late_inputs import LateInputs, Leg
from epd.stages.push import Push, Pushes
from epd.stages.startup import LoadedEngine, load_encoder, load_engine, prepare, warm_up_encoder, warm_up_engine
from epd.stages.stats import Counters, WorkerStats
from epd.stages.takeover import Takeovers
from epd.stages.tasks import all_or_first_error
from epd.transfer.base import PeerClient
from epd.transfer.factory import Backend, build_connectors
from epd.types import (
    AwaitedPrefill,
    DecodeSource,
    Embedding,
    EmbeddingHandle,
    Encoded,
    KVHandle,
    KVTarget,
    MediaItem,
    Modality,
    ModelFamily,
    Prefilled,
    Prompt,
    PushedKV,
    ReplicaLoad,
    Request,
    Stage,
    StageReport,
    TokenChunk,
)

if TYPE_CHECKING:
    import torch
    from PIL import Image

_LOG = logging.getLogger(__name__)
_RELEASE_TIMEOUT_S = 5.0
T = TypeVar("T")


class StageWorker:
    """One replica. Built off the event loop, since it reads weights; ``start`` and everything after runs on the loop.

    ``peers`` reaches the owners of handles; ``backend`` is ``nixl`` or ``by_reference`` (already resolved).
    """

    def __init__(
        self,
        *,
        replica_id: str,
        pool: str,
        roles: frozenset[Stage],
        family: ModelFamily,
        model: ModelConfig,
        engine: EngineConfig,
        transfer: TransferConfig,
        media: MediaConfig,
        peers: PeerClient,
        backend: Backend,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replica_id = replica_id
        self.pool = pool
        self.roles = roles
        self._family = family
        self._transfer = transfer
        self._counters = Counters()
        prepare(engine)
        self._embeddings = EmbeddingCache(engine.embedding_cache_bytes)
        self._encoding: EncodeService | None = None
        if Stage.ENCODE in roles:
            self._encoding = EncodeService(
                load_encoder(replica_id, family, model.dtype, engine),
                self._embeddings,
                lambda item, payload: _decode_media(item, payload, media),
                max_batch_patches=engine.encode_batch_patches,
                num_preprocess_threads=engine.num_preprocess_threads,
                num_threads=engine.num_threads,
                decode_timeout_s=media.decode_timeout_s,
            )
        kv_cache = None
        self._loaded: LoadedEngine | None = None
        self.engine_thread: EngineThread | None = None
        self._block_size = engine.kv_block_size
        self._num_blocks = 0
        self._block_bytes = 0
        if roles & {Stage.PREFILL, Stage.DECODE}:
            self._loaded = load_engine(replica_id, family, model.dtype, engine)
            kv_cache = self._loaded.kv_cache
            self._block_bytes = kv_cache.block_bytes
            self._num_blocks = kv_cache.num_blocks
            self.engine_thread = EngineThread(self._loaded.engine, num_threads=engine.num_threads)
        connectors = build_connectors(
            backend,
            owner=replica_id,
            kv_cache=kv_cache,
            embedding_slab_bytes=engine.embedding_cache_bytes,
            embedding_layout=f"{family.fingerprint}|{model.dtype}|{family.embedding_width}",
            embedding_width=family.embedding_width,
            embedding_dtype=model.dtype,
            lease_s=transfer.lease_s,
            peers=peers,
            clock=clock,
            device=engine.device,
        )
        self.data = DataPlane(connectors, peers, transfer.lease_s)
        self._late: LateInputs[EmbeddingHandle] = LateInputs(self.data.release_soon, keep_s=transfer.lease_s)
        self._takeovers: Takeovers | None = None
        self._pushes: Pushes | None = None
        if self.engine_thread is not None and self.data.kv is not None:
            if transfer.kv_mode == "push" and not self.data.kv.supports_push:
                raise ConfigError("args.transfer.kv_mode", f"{self.data.kv.backend} cannot push; use auto or pull")
            engine_thread, connector = self.engine_thread, self.data.kv
            self._pushes = Pushes(engine_thread, connector, transfer.lease_s)
            self._takeovers = Takeovers(engine_thread, connector, self.data, peers, family, transfer, self._counters)

    # -- life of the replica -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the threads, and run everything once on the thread that will run it: when this returns, it is warm."""
        if self.engine_thread is not None and self._loaded is not None:
            self.engine_thread.start()
            await warm_up_engine(self.replica_id, self.engine_thread, self._loaded)
        if self._encoding is not None:
            await warm_up_encoder(self.replica_id, self._encoding, self._family)
        self.data.start()

    async def close(self) -> None:
        """Stop computing, end all claims, and give threads and transport back."""
        if self._encoding is not None:
            await self._encoding.close()
        await self.data.close()
        if self.engine_thread is not None:
            await self.engine_thread.close()

    @property
    def is_healthy(self) -> bool:
        return self.engine_thread is None or self.engine_thread.is_alive

    # -- encode --------------------------------------------------------------------------------------------------------

    async def encode(self, request: Request, payloads: Mapping[int, bytes]) -> Encoded:
        """See ``StageClient``."""
        if self._encoding is None or self.data.embedding is None:
            raise self._lacks(Stage.ENCODE)
        items = [request.items[index] for index in payloads]
        claimed: list[EmbeddingHandle] = []
        with self._counters.stage(Stage.ENCODE):
            try:
                with HeldEmbeddings(self._embeddings) as held:
                    report = await self._obtain_all(items, payloads, held)
                    for item in items:
                        claimed.append(self.data.embedding.publish(item.mm_hash, held[item.index].values))
                return Encoded(tuple(claimed), report)
            except BaseException:
                for handle in claimed:
                    self.data.embedding.release(handle.handle_id)
                raise

    async def _obtain_all(
        self, items: Sequence[MediaItem], payloads: Mapping[int, bytes], held: HeldEmbeddings
    ) -> StageReport:
        reports = await all_or_first_error([self._obtain(item, payloads[item.index], held) for item in items])
        return sum(reports, StageReport())

    async def _obtain(self, item: MediaItem, payload: bytes, held: HeldEmbeddings) -> StageReport:
        if self._encoding is None:
            raise self._lacks(Stage.ENCODE)
        embedding, report = await self._encoding.obtain(item, payload)
        held.add(item, embedding)
        if "encode" in report.timings_s:
            self._counters.stage_seconds[Stage.ENCODE].observe(report.timings_s["encode"])
        return report

    # -- prefill -------------------------------------------------------------------------------------------------------

    async def prefill(self, request: Request, prompt: Prompt, payloads: Mapping[int, bytes]) -> Prefilled:
        """See ``StageClient``."""
        if self.data.kv is None or Stage.PREFILL not in self.roles:
            raise self._lacks(Stage.PREFILL)
        with self._counters.stage(Stage.PREFILL, *self._fused_encode(payloads)):
            async with (
                self._prompt_running(request, prompt, payloads, keep_kv=True) as (stream, feeding),
                self._pushing(prompt, stream) as push,
            ):
                done = await stream.prefill_done()
                report = _report_so_far(feeding)
                kv, pushed = await self._hand_over(request, stream, done, push)
                report = report + pushed
                for chunk in done.first_tokens:
                    if chunk.report is not None:
                        report = report + chunk.report
                        self._counters.stage_seconds[Stage.PREFILL].observe(chunk.report.timings_s["prefill"])
                first_tokens = tuple(replace(chunk, report=None) for chunk in done.first_tokens)
                return Prefilled(kv, first_tokens, done.num_cached_tokens, report)

    @contextlib.asynccontextmanager
    async def _pushing(self, prompt: Prompt, stream: RequestStream) -> AsyncIterator[Push | None]:
        if not prompt.is_pushed or self._pushes is None:
            yield None
            return
        async with self._pushes.pushing(prompt.leg_id, stream) as push:
            yield push

    async def _hand_over(
        self, request: Request, stream: RequestStream, done: PrefillDone, push: Push | None
    ) -> tuple[KVHandle | PushedKV | None, StageReport]:
        """Say where the blocks of a finished prefill are: pushed, or lent out from here."""
        connector, delta = self.data.kv, self._rotary_delta(request)
        assert connector is not None
        if push is not None:
            started_s = time.monotonic()
            try:
                target = await push.finished(done)
            except TransferError as error:
                _LOG.warning("KV blocks could not be pushed, and will be fetched instead: %s", error)
                self._counters.transfer_failures["kv"] += 1
                target = None
            if target is not None:
                num_bytes = target.num_blocks * self._block_bytes
                self._counters.transferred("kv", connector.backend, num_bytes)
                report = StageReport({"kv_transfer": time.monotonic() - started_s}, {"kv": num_bytes})
                # The blocks here are not needed any more: leaving the stream frees them.
                return PushedKV(target.target_id, done.num_tokens, delta), report
        # No await between taking the hold over and lending it out: a cancellation finds no gap.
        stream.take_hold()
        return (None if done.hold_id is None else self._lend(done, delta)), StageReport()

    def _lend(self, done: PrefillDone, rotary_delta: int) -> KVHandle:
        engine, connector, hold_id = self.engine_thread, self.data.kv, done.hold_id
        assert engine is not None
        assert connector is not None
        assert hold_id is not None

        def free() -> None:
            engine.post(lambda running: running.release_hold(hold_id))

        try:
            return connector.publish(done.block_ids, done.num_tokens, rotary_delta, free)
        except BaseException:
            free()
            raise

    def _rotary_delta(self, request: Request) -> int:
        return self._family.rotary_positions(request).delta

    def _fused_encode(self, payloads: Mapping[int, bytes]) -> tuple[Stage, ...]:
        return (Stage.ENCODE,) if payloads else ()

    @contextlib.asynccontextmanager
    async def _prompt_running(
        self, request: Request, prompt: Prompt, payloads: Mapping[int, bytes], *, keep_kv: bool
    ) -> AsyncIterator[tuple[RequestStream, asyncio.Task[StageReport]]]:
        """Run a prompt on the engine while its embeddings are made or fetched; on leaving, drop what is left of it."""
        engine = self._running_engine()
        rotary = self._family.rotary_positions(request)
        claims = {index: handle for index, handle in enumerate(prompt.embeddings) if handle is not None}
        with HeldEmbeddings(self._embeddings) as held, self._late.leg(prompt.leg_id, prompt.awaited) as leg:
            async with engine.stream(request.request_id) as stream:
                await engine.call(lambda running: running.add(request, rotary, keep_kv=keep_kv))
                feeding = asyncio.create_task(self._feed(request, claims, leg, payloads, held))
                feeding.add_done_callback(partial(_fail_with, stream))
                try:
                    yield stream, feeding
                finally:
                    feeding.cancel()
                    await asyncio.gather(feeding, return_exceptions=True)
                    for unfetched in claims.values():
                        self.data.release_soon(unfetched)

    async def _feed(
        self,
        request: Request,
        claims: dict[int, EmbeddingHandle],
        leg: Leg[EmbeddingHandle],
        payloads: Mapping[int, bytes],
        held: HeldEmbeddings,
    ) -> StageReport:
        """Give the engine each embedding as it becomes available; take those out of ``claims`` that are fetched."""
        engine = self._running_engine()

        async def one(item: MediaItem) -> StageReport:
            if item.index in claims:
                report = await self._fetch_embedding(item, claims.pop(item.index), held)
            elif item.index in leg:
                report = await self._await_embedding(item, leg, held)
            elif item.index in payloads:
                report = await self._obtain(item, payloads[item.index], held)
            else:
                raise StageFailedError("prefill", f"{item.param}: neither an embedding nor the media itself came along")
            embedding = held[item.index]
            await engine.call(lambda running: running.set_embedding(request.request_id, item.index, embedding))
            return report

        reports = await all_or_first_error([one(item) for item in request.items])
        return sum(reports, StageReport())

    async def _await_embedding(self, item: MediaItem, leg: Leg[EmbeddingHandle], held: HeldEmbeddings) -> StageReport:
        """Wait for an embedding that is being made elsewhere, unless it is here already."""
        if (cached := self._embeddings.acquire(item.mm_hash)) is not None:
            held.add(item, cached)
            leg.decline(item.index)
            return StageReport(cached={"embedding_items": 1})
        return await self._fetch_embedding(item, await leg.take(item.index), held)

    async def _fetch_embedding(self, item: MediaItem, handle: EmbeddingHandle, held: HeldEmbeddings) -> StageReport:
        connector = self.data.embedding
        if connector is None:
            raise self._lacks(Stage.PREFILL)
        try:
            if (cached := self._embeddings.acquire(item.mm_hash)) is not None:
                held.add(item, cached)
                return StageReport(cached={"embedding_items": 1})
            started_s = time.monotonic()
            async with self.data.kept_alive(handle):
                values = await connector.fetch(handle)
            held.add(item, self._embeddings.put(item.mm_hash, Embedding(values)))
            self._counters.transferred("embedding", connector.backend, handle.nbytes)
            return StageReport({"embedding_transfer": time.monotonic() - started_s}, {"embedding": handle.nbytes})
        except TransferError:
            self._counters.transfer_failures["embedding"] += 1
            raise
        finally:
            self.data.release_soon(handle)

    # -- decode --------------------------------------------------------------------------------------------------------

    async def decode(
        self, request: Request, source: DecodeSource, payloads: Mapping[int, bytes]
    ) -> AsyncGenerator[tuple[TokenChunk, ...]]:
        """See ``StageClient``."""
        if Stage.DECODE not in self.roles:
            raise self._lacks(Stage.DECODE)
        if isinstance(source, AwaitedPrefill):
            run = self._takeovers_here().awaited(request, source, partial(self._counted, ()))
            async with contextlib.aclosing(run):
                async for chunks in run:
                    yield chunks
            return
        if isinstance(source, Prompt):
            stages, run = (Stage.PREFILL, *self._fused_encode(payloads)), self._decode_prompt(request, source, payloads)
        else:
            stages, run = (), self._takeovers_here().prefilled(request, source)
        async with contextlib.aclosing(self._counted(stages, run)) as counted:
            async for chunks in counted:
                yield chunks

    async def _counted(
        self, stages: tuple[Stage, ...], run: AsyncGenerator[tuple[TokenChunk, ...]]
    ) -> AsyncGenerator[tuple[TokenChunk, ...]]:
        """Pass a decode's chunks on, counted and timed."""
        started_s = time.monotonic()
        with self._counters.stage(Stage.DECODE, *stages):
            async with contextlib.aclosing(run):
                async for chunks in run:
                    if chunks[-1].finish_reason is not None:
                        chunks = (*chunks[:-1], self._with_decode_time(chunks[-1], started_s))
                    yield chunks

    def _with_decode_time(self, chunk: TokenChunk, started_s: float) -> TokenChunk:
        before = chunk.report or StageReport()
        decode_s = time.monotonic() - started_s
        self._counters.stage_seconds[Stage.DECODE].observe(decode_s)
        return replace(chunk, report=before + StageReport({"decode": decode_s}))

    async def _decode_prompt(
        self, request: Request, prompt: Prompt, payloads: Mapping[int, bytes]
    ) -> AsyncGenerator[tuple[TokenChunk, ...]]:
        if Stage.PREFILL not in self.roles:
            raise self._lacks(Stage.PREFILL)
        async with self._prompt_running(request, prompt, payloads, keep_kv=False) as (stream, feeding):
            first = await anext(stream)
            report = _report_so_far(feeding)
            for chunk in first:
                if chunk.report is not None:
                    self._counters.stage_seconds[Stage.PREFILL].observe(chunk.report.timings_s["prefill"])
            yield (replace(first[0], report=report + (first[0].report or StageReport())), *first[1:])
            async for chunks in stream:
                yield chunks

    async def provide(self, leg_id: str, index: int, handle: EmbeddingHandle) -> bool:
        """See ``StageClient``."""
        return self._late.provide(leg_id, index, handle)

    async def resume(self, leg_id: str, prefilled: Prefilled) -> bool:
        """See ``StageClient``."""
        return self._takeovers_here().resume(leg_id, prefilled)

    def introduction(self) -> bytes:
        """See ``KVConnector``; empty where there is nothing to introduce."""
        return b"" if self.data.kv is None else self.data.kv.introduction()

    async def meet(self, introduction: bytes) -> None:
        """See ``KVConnector``."""
        if self.data.kv is not None:
            await self.data.kv.meet(introduction)

    def push_to(self, leg_id: str, target: KVTarget) -> bool:
        """See ``PeerClient``."""
        return self._pushes is not None and self._pushes.offer(leg_id, target)

    async def stop_push(self, target_id: str) -> None:
        """See ``PeerClient``."""
        if self._pushes is not None:
            await self._pushes.stop(target_id)

    # -- memory lent to others -----------------------------------------------------------------------------------------

    async def release(self, handle_ids: Sequence[str]) -> None:
        """See ``StageClient``."""
        self.data.release(handle_ids)

    async def renew(self, handle_ids: Sequence[str]) -> None:
        """Start leases anew. Raises ``HandleExpiredError`` for one that has ended."""
        self.data.renew(handle_ids)

    def read(self, handle_id: str, first: int, count: int) -> torch.Tensor:
        """Return a copy of lent memory; see ``PeerClient.read``. Thread-safe."""
        return self.data.read(handle_id, first, count).cpu()  # what carries it may know nothing of devices

    # -- what it says of itself ----------------------------------------------------------------------------------------

    def load(self) -> ReplicaLoad:
        load = self.engine_thread.load if self.engine_thread is not None else None
        encoding = self._encoding
        return ReplicaLoad(
            replica_id=self.replica_id,
            pool=self.pool,
            roles=self.roles,
            num_waiting=load.num_waiting if load else 0,
            num_running=load.num_running if load else 0,
            num_queued_prefill_tokens=load.num_queued_prefill_tokens if load else 0,
            num_queued_encode_items=encoding.num_queued_items if encoding else 0,
            num_queued_encode_patches=encoding.num_queued_patches if encoding else 0,
            num_context_tokens=load.num_context_tokens if load else 0,
            num_blocks=self._num_blocks,
            num_free_blocks=load.num_free_blocks if load else 0,
            block_size=self._block_size,
            num_live_handles=sum(connector.num_live for connector in self.data.by_kind.values()),
            reported_at_s=time.monotonic(),
        )

    def stats(self) -> WorkerStats:
        load, encoding, counters = self.load(), self._encoding, self._counters
        engine_stats = self.engine_thread.stats if self.engine_thread is not None else None
        connectors = self.data.by_kind
        return WorkerStats(
            stage_requests={stage: counters.stage_requests[stage] for stage in self.roles},
            stage_seconds={stage: counters.stage_seconds[stage] for stage in self.roles},
            encode_items=encoding.stats.num_items if encoding else 0,
            prefill_tokens=engine_stats.prefill_tokens if engine_stats else 0,
            decode_tokens=engine_stats.decode_tokens if engine_stats else 0,
            transfer_bytes=dict(counters.transfer_bytes),
            transfer_failures=dict(counters.transfer_failures),
            prefix_cache_tokens={
                "hit": engine_stats.prefix_hit_tokens if engine_stats else 0,
                "miss": engine_stats.prefill_tokens if engine_stats else 0,
            },
            embedding_cache_items={
                "hit": encoding.stats.num_hits if encoding else 0,
                "miss": encoding.stats.num_misses if encoding else 0,
            },
            preemptions=engine_stats.preemptions if engine_stats else 0,
            queue_requests=self._queues(load),
            running_requests={stage: counters.running[stage] for stage in self.roles},
            kv_blocks_total=load.num_blocks,
            kv_blocks_free=load.num_free_blocks,
            handles_live={kind: connector.num_live for kind, connector in connectors.items()},
            handles_live_bytes={kind: connector.live_bytes for kind, connector in connectors.items()},
            handles_oldest_s={kind: connector.oldest_lease_s for kind, connector in connectors.items()},
        )

    def _queues(self, load: ReplicaLoad) -> dict[str, int]:
        queues: dict[str, int] = {}
        if Stage.ENCODE in self.roles:
            queues[Stage.ENCODE] = load.num_queued_encode_items
        engine_stage = Stage.PREFILL if Stage.PREFILL in self.roles else Stage.DECODE
        if engine_stage in self.roles:
            queues[engine_stage] = load.num_waiting
        return queues

    async def check_integrity(self) -> None:
        """Assert that all books balance; when idle, that nothing is held."""
        self._embeddings.check_integrity()
        if self.engine_thread is not None:
            await self.engine_thread.call(lambda running: running.check_integrity())
        if not any(self._counters.running.values()):
            assert self._embeddings.num_referenced == 0, "idle, but embeddings are still referenced"

    def _running_engine(self) -> EngineThread:
        if self.engine_thread is None:
            raise self._lacks(Stage.PREFILL)
        return self.engine_thread

    def _takeovers_here(self) -> Takeovers:
        if self._takeovers is None:
            raise self._lacks(Stage.DECODE)
        return self._takeovers

    def _lacks(self, stage: Stage) -> StageFailedError:
        return StageFailedError(stage, f"replica {self.replica_id} does not have the role {stage.value}")


def _fail_with(stream: RequestStream, feeding: asyncio.Task[StageReport]) -> None:
    """End a request whose embeddings cannot be had."""
    if not feeding.cancelled() and (error := feeding.exception()) is not None:
        stream.fail(error)


def _report_so_far(feeding: asyncio.Task[StageReport]) -> StageReport:
    """What embeddings took. A prompt that was found whole in the prefix cache does not wait for them."""
    return feeding.result() if feeding.done() else StageReport()


def _decode_media(item: MediaItem, payload: bytes, limits: MediaConfig) -> Sequence[Image.Image]:
    """Decode one item to RGB frames. Raises ``MediaError``."""
    try:
        if item.modality is Modality.VIDEO:
            return decode_video(payload, item.timestamps_s, limits)
        return [decode_image(payload, limits)]
    except MediaError as error:
        raise error if error.param else MediaError(error.message, item.param) from error
