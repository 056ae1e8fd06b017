"""Fakes for tests of whatever drives a stage: deterministic, in memory, honest about what they hold.

``FakeStageWorker`` has the surface of ``epd.stages.worker.StageWorker`` and its bookkeeping (claims that must be
released, ``check_integrity``), but no model: the output echoes the prompt. Knows nothing of Ray, engines or transports.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from epd.errors import HandleExpiredError, MediaError
from epd.stages.late_inputs import LateInputs
from epd.stages.stats import WorkerStats
from epd.transfer.base import PeerClient
from epd.types import (
    AwaitedPrefill,
    DecodeSource,
    EmbeddingHandle,
    Encoded,
    FinishReason,
    KVHandle,
    KVTarget,
    Prefilled,
    Prompt,
    ReplicaLoad,
    Request,
    Stage,
    StageReport,
    TokenChunk,
)

if TYPE_CHECKING:
    import torch

__all__ = ["UNDECODABLE", "FakeStageWorker", "echo_tokens"]

UNDECODABLE = b"not an image"
"""A payload that ``FakeStageWorker`` refuses, as a real encoder refuses bytes that it cannot decode."""


def echo_tokens(request: Request) -> tuple[int, ...]:
    """Return the tokens that a fake decodes for a request: its prompt, over and over, up to ``max_tokens``."""
    tokens = itertools.islice(itertools.cycle(request.prompt_token_ids), request.sampling.max_tokens)
    return tuple(tokens)[len(request.output_token_ids) :]


class FakeStageWorker:
    """A stage worker without a model. Each fetch from a peer goes through ``peers.read``, like a by-reference one, and
    ends in a release.

    ``pause`` is awaited before each token after the first, so that a test decides how long a stream lasts.
    """

    def __init__(
        self,
        replica_id: str,
        pool: str,
        roles: Iterable[Stage],
        peers: PeerClient,
        *,
        block_size: int = 16,
        num_blocks: int = 4096,
        pause: Callable[[], object] | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.pool = pool
        self.roles = frozenset(roles)
        self.is_healthy = True
        self._peers = peers
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._pause = pause
        self._handle_numbers = itertools.count()
        self._claims: dict[str, int] = {}
        """Live handles: handle id to its size, in blocks for a KV handle and in rows for an embedding."""
        self._running: dict[str, int] = {}
        self._num_renewals = 0
        self._stats = WorkerStats()
        self._given_up: list[EmbeddingHandle | KVHandle] = []
        self._late: LateInputs[EmbeddingHandle] = LateInputs(self._given_up.append)
        self._prefills: LateInputs[Prefilled] = LateInputs(self._give_up)

    # -- stages ------------------------------------------------------------------------------------------------------

    async def encode(self, request: Request, payloads: Mapping[int, bytes]) -> Encoded:
        self._count(Stage.ENCODE)
        handles: list[EmbeddingHandle] = []
        try:
            for index, data in payloads.items():
                handles.append(self._encode_item(request, index, data))
        except MediaError:
            await self.release([handle.handle_id for handle in handles])
            raise
        return Encoded(tuple(handles), StageReport({"encode": 0.0}))

    async def prefill(self, request: Request, prompt: Prompt, payloads: Mapping[int, bytes]) -> Prefilled:
        num_blocks = -(-request.num_prefill_tokens // self._block_size)
        with _Running(self._running, request.request_id, num_blocks):
            self._count(Stage.PREFILL)
            await self._embed(request, prompt, payloads)
        token = echo_tokens(request)[0]
        is_done = len(request.output_token_ids) + 1 >= request.sampling.max_tokens
        finish_reason = FinishReason.LENGTH if is_done else None
        first = tuple(
            TokenChunk(request.first_choice + choice, (token,), finish_reason) for choice in range(request.sampling.n)
        )
        kv = None if is_done else self._kv_handle(request, num_blocks)
        return Prefilled(kv, first, 0, StageReport({"prefill": 0.0}))

    async def decode(
        self, request: Request, source: DecodeSource, payloads: Mapping[int, bytes]
    ) -> AsyncGenerator[tuple[TokenChunk, ...]]:
        if isinstance(source, AwaitedPrefill):
            with self._prefills.leg(source.leg_id, frozenset({0})) as leg:
                source = await leg.take()
            if source.kv is None:
                return
        num_blocks = -(-request.num_prefill_tokens // self._block_size)
        with _Running(self._running, request.request_id, num_blocks):
            tokens = echo_tokens(request)
            if isinstance(source, Prompt):
                await self._embed(request, source, payloads)
                self._count(Stage.PREFILL)
            else:
                assert isinstance(source.kv, KVHandle), "a fake lends its blocks, and pushes none"
                await self._fetch(source.kv, num_blocks, "kv")
                tokens = tokens[1:]
            self._count(Stage.DECODE)
            for position, token in enumerate(tokens):
                if position and self._pause is not None:
                    await self._paused()
                is_last = position == len(tokens) - 1
                yield tuple(
                    TokenChunk(
                        request.first_choice + choice,
                        (token,),
                        FinishReason.LENGTH if is_last else None,
                        report=StageReport({"decode": 0.0}) if is_last else None,
                    )
                    for choice in range(request.sampling.n)
                )
                self._stats.decode_tokens += request.sampling.n

    async def provide(self, leg_id: str, index: int, handle: EmbeddingHandle) -> bool:
        return self._late.provide(leg_id, index, handle)

    async def resume(self, leg_id: str, prefilled: Prefilled) -> bool:
        return self._prefills.provide(leg_id, 0, prefilled)

    def introduction(self) -> bytes:
        return b""

    async def meet(self, introduction: bytes) -> None:
        pass

    def push_to(self, leg_id: str, target: KVTarget) -> bool:
        return False

    async def stop_push(self, target_id: str) -> None:
        pass

    async def release(self, handle_ids: Sequence[str]) -> None:
        for handle_id in handle_ids:
            self._claims.pop(handle_id, None)

    # -- what peers and operators ask ----------------------------------------------------------------------------------

    async def renew(self, handle_ids: Sequence[str]) -> None:
        for handle_id in handle_ids:
            self._size_of(handle_id)
        self._num_renewals += 1

    def read(self, handle_id: str, first: int, count: int) -> torch.Tensor:
        import torch

        self._size_of(handle_id)
        return torch.arange(first, first + count, dtype=torch.float32).repeat_interleave(64).reshape(count, 64)

    def load(self) -> ReplicaLoad:
        used_blocks = sum(self._running.values())
        return ReplicaLoad(
            self.replica_id,
            self.pool,
            self.roles,
            num_running=len(self._running),
            num_blocks=self._num_blocks,
            num_free_blocks=self._num_blocks - used_blocks,
            block_size=self._block_size,
            num_live_handles=len(self._claims),
        )

    def stats(self) -> WorkerStats:
        load = self.load()
        self._stats.kv_blocks_total = load.num_blocks
        self._stats.kv_blocks_free = load.num_free_blocks
        self._stats.running_requests = {"decode": load.num_running}
        self._stats.queue_requests = {"decode": 0}
        self._stats.handles_live = {"kv": load.num_live_handles}
        return self._stats

    async def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the blocks do not add up. Claims may outlive the request that made them."""
        load = self.load()
        assert 0 <= load.num_free_blocks <= load.num_blocks, (
            f"{load.num_free_blocks} of {load.num_blocks} blocks are free"
        )

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        self._claims.clear()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _count(self, stage: Stage) -> None:
        self._stats.stage_requests[stage] = self._stats.stage_requests.get(stage, 0) + 1

    def _encode_item(self, request: Request, index: int, data: bytes) -> EmbeddingHandle:
        item = request.items[index]
        if data == UNDECODABLE:
            raise MediaError("the image cannot be decoded", item.param)
        self._stats.encode_items += 1
        handle_id = self._claim(item.num_tokens)
        return EmbeddingHandle(
            handle_id, self.replica_id, "fake", len(data), 30.0, "fake", b"", item.mm_hash, item.num_tokens
        )

    def _give_up(self, prefilled: Prefilled) -> None:
        if isinstance(prefilled.kv, KVHandle):
            self._given_up.append(prefilled.kv)

    def _kv_handle(self, request: Request, num_blocks: int) -> KVHandle:
        handle_id = self._claim(num_blocks)
        return KVHandle(
            handle_id, self.replica_id, "fake", num_blocks, 30.0, "fake", b"", request.num_prefill_tokens, num_blocks, 0
        )

    def _claim(self, size: int) -> str:
        handle_id = f"{self.replica_id}/{next(self._handle_numbers)}"
        self._claims[handle_id] = size
        return handle_id

    def _size_of(self, handle_id: str) -> int:
        if handle_id not in self._claims:
            raise HandleExpiredError(f"handle {handle_id} is not held by {self.replica_id}")
        return self._claims[handle_id]

    async def _embed(self, request: Request, prompt: Prompt, payloads: Mapping[int, bytes]) -> None:
        with self._late.leg(prompt.leg_id, prompt.awaited) as leg:
            for index, handle in enumerate(prompt.embeddings):
                if index in prompt.awaited:
                    handle = await leg.take(index)
                if handle is None:
                    self._count(Stage.ENCODE)
                    own = self._encode_item(request, index, payloads[index])
                    await self.release([own.handle_id])
                else:
                    await self._fetch(handle, handle.num_tokens, "embedding")
        while self._given_up:
            unwanted = self._given_up.pop()
            await self._peers.release(unwanted.owner, [unwanted.handle_id])

    async def _fetch(self, handle: EmbeddingHandle | KVHandle, count: int, kind: str) -> None:
        if handle.owner == self.replica_id:
            self._size_of(handle.handle_id)
            await self.release([handle.handle_id])
            return
        await self._peers.renew(handle.owner, [handle.handle_id])
        values = await self._peers.read(handle.owner, handle.handle_id, 0, count)
        assert values.shape[0] == count
        await self._peers.release(handle.owner, [handle.handle_id])
        key = (kind, handle.backend)
        self._stats.transfer_bytes[key] = self._stats.transfer_bytes.get(key, 0) + values.nbytes

    async def _paused(self) -> None:
        assert self._pause is not None
        paused = self._pause()
        if asyncio.iscoroutine(paused):
            await paused


class _Running:
    """Counts a request's blocks as used for as long as it runs, however it ends."""

    def __init__(self, running: dict[str, int], request_id: str, num_blocks: int) -> None:
        self._running = running
        self._request_id = request_id
        self._num_blocks = num_blocks

    def __enter__(self) -> None:
        self._running[self._request_id] = self._num_blocks

    def __exit__(self, *exc_info: object) -> None:
        self._running.pop(self._request_id, None)
