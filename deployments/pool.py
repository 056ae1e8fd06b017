"""One replica of a pool: a stage worker behind Serve. Knows nothing of models, placement or HTTP.

Every answer carries the replica's load, so that the ingress rarely has to ask. Sync methods run in Serve's thread pool,
async ones on the replica's loop, which never runs a forward pass: the worker has threads of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from ray import serve

from deployments.messages import ChannelMessage, LaneAddress, Payloads, ReplicaAddress, Reply, StreamItem
from deployments.payload_inbox import PayloadInbox
from deployments.replica_logging import quieten_replica_log
from deployments.token_channel import Outlets
from epd.errors import AdmissionRejectedError
from epd.stages.stats import WorkerStats
from epd.transfer.base import PeerClient
from epd.types import (
    DecodeSource,
    EmbeddingHandle,
    Encoded,
    KVTarget,
    Prefilled,
    Prompt,
    ReplicaLoad,
    Request,
    StageClient,
)

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

CLOSE_POLL_INTERVAL_S = 0.05
LOAD_INTERVAL_S = 0.1
"""How often a stream's items repeat the replica's load."""


class Worker(StageClient, Protocol):
    """What a replica holds: ``epd.stages.worker.StageWorker``, or a fake of it."""

    @property
    def is_healthy(self) -> bool: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def renew(self, handle_ids: Sequence[str]) -> None: ...

    def read(self, handle_id: str, first: int, count: int) -> torch.Tensor: ...

    def introduction(self) -> bytes: ...

    async def meet(self, introduction: bytes) -> None: ...

    def push_to(self, leg_id: str, target: KVTarget) -> bool: ...

    async def stop_push(self, target_id: str) -> None: ...

    def load(self) -> ReplicaLoad: ...

    def stats(self) -> WorkerStats: ...

    async def check_integrity(self) -> None: ...


WorkerFactory = Callable[[str, PeerClient], Worker]
"""Builds the worker of the replica with the given id, weights loaded; may take long."""


class StagePool:
    """One replica of any pool; each pool is a Serve deployment of its name."""

    def __init__(self, pool: str, make_worker: WorkerFactory, max_ongoing_requests: int) -> None:
        from deployments.client import RayPeerClient

        context = serve.get_replica_context()
        self.replica_id = str(ReplicaAddress(pool, context.replica_id.unique_id))
        self._max_ongoing_requests = max_ongoing_requests
        self._num_ongoing_requests = 0
        self._inbox = PayloadInbox()
        self._outlets = Outlets()
        self._starting: asyncio.Task[None] | None = None
        self._worker = make_worker(self.replica_id, RayPeerClient(context.app_name))

    # -- stages --------------------------------------------------------------------------------------------------------

    async def encode(self, request: Request, payloads: Payloads) -> Reply[Encoded]:
        with self._admitted(payloads) as data:
            return self._reply(await self._worker.encode(request, data))

    async def prefill(self, request: Request, prompt: Prompt, payloads: Payloads) -> Reply[Prefilled]:
        with self._admitted(payloads) as data:
            return self._reply(await self._worker.prefill(request, prompt, data))

    async def decode(
        self,
        request: Request,
        source: DecodeSource,
        payloads: Payloads,
        lane: LaneAddress | None = None,
    ) -> AsyncGenerator[StreamItem]:
        """Yield the items that do not leave through the caller's channel; the first and the last never do."""
        index = 0
        with self._admitted(payloads) as data, self._outlets.lane(lane) as put:
            loads = _Loads(self._worker)
            async with contextlib.aclosing(self._worker.decode(request, source, data)) as stream:
                async for chunks in stream:
                    if not index or not put(index, chunks):
                        yield StreamItem(chunks, loads.if_due(), index)
                    index += 1
        yield StreamItem((), self._worker.load(), index)

    async def outputs(self, channel_id: str) -> AsyncGenerator[ChannelMessage]:
        """Open a caller's channel: yield what its streams have ready, until it has had none for a while."""
        loads = _Loads(self._worker)
        async with contextlib.aclosing(self._outlets.messages(channel_id)) as messages:
            async for items in messages:
                yield ChannelMessage(items, loads.if_due())

    async def provide(self, leg_id: str, index: int, handle: EmbeddingHandle) -> Reply[bool]:
        return self._reply(await self._worker.provide(leg_id, index, handle))

    async def resume(self, leg_id: str, prefilled: Prefilled) -> Reply[bool]:
        return self._reply(await self._worker.resume(leg_id, prefilled))

    async def release(self, handle_ids: Sequence[str]) -> Reply[None]:
        await self._worker.release(handle_ids)
        return self._reply(None)

    # -- data plane ----------------------------------------------------------------------------------------------------

    async def deposit(self, ticket: str, indices: Sequence[int], *payloads: bytes) -> None:
        """Keep bytes that a later call claims by ``ticket``."""
        self._inbox.deposit(ticket, dict(zip(indices, payloads, strict=True)))

    async def discard(self, ticket: str) -> None:
        self._inbox.discard(ticket)

    async def renew(self, handle_ids: Sequence[str]) -> None:
        await self._worker.renew(handle_ids)

    async def introduction(self) -> bytes:
        return self._worker.introduction()

    async def meet(self, introduction: bytes) -> None:
        await self._worker.meet(introduction)

    async def push_to(self, leg_id: str, target: KVTarget) -> bool:
        return self._worker.push_to(leg_id, target)

    async def stop_push(self, target_id: str) -> None:
        await self._worker.stop_push(target_id)

    def read(self, handle_id: str, first: int, count: int) -> torch.Tensor:
        """Return a copy of a handle's data. Called by reference, so that it leaves through the object store."""
        return self._worker.read(handle_id, first, count)

    # -- control -------------------------------------------------------------------------------------------------------

    async def load(self) -> ReplicaLoad:
        await self._started()
        return self._worker.load()

    async def stats(self) -> WorkerStats:
        return self._worker.stats()

    async def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the worker's memory does not add up, or if bytes wait for nobody."""
        await self._worker.check_integrity()
        if not self._num_ongoing_requests:
            assert not self._inbox.num_bytes, f"{self._inbox.num_bytes} bytes of media are held for no request"

    async def check_health(self) -> None:
        await self._started()
        self._inbox.expire()
        if not self._worker.is_healthy:
            raise RuntimeError(f"the engine of {self.replica_id} has failed")

    async def close(self) -> None:
        """Stop, once nobody holds a claim on memory here any more.

        Serve calls this when the last call has ended, and kills a replica that takes longer than its
        ``graceful_shutdown_timeout_s``. Without the wait, scaling down would pull KV blocks from under a peer that
        reads them.
        """
        while self._worker.load().num_live_handles:  # noqa: ASYNC110 - the count is kept in another thread
            await asyncio.sleep(CLOSE_POLL_INTERVAL_S)
        await self._worker.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _started(self) -> None:
        """Start the worker on this loop, once. Serve checks health before it sends the first request."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._worker.start())
        await asyncio.shield(self._starting)

    @contextlib.contextmanager
    def _admitted(self, payloads: Payloads) -> Iterator[dict[int, bytes]]:
        """Count a stage call against the pool's limit, and hand out its media bytes.

        Serve's own limit is set higher: a replica full of streams must still answer ``release`` and ``renew``.
        """
        if self._num_ongoing_requests >= self._max_ongoing_requests:
            raise AdmissionRejectedError(
                f"{self.replica_id} is at its limit of {self._max_ongoing_requests} requests", "queue_full", 1.0
            )
        self._num_ongoing_requests += 1
        try:
            yield dict(payloads.inline if payloads.ticket is None else self._inbox.claim(payloads.ticket).items())
        finally:
            self._num_ongoing_requests -= 1

    def _reply(self, value: T) -> Reply[T]:
        return Reply(value, self._worker.load())


class StagePoolReplica(StagePool):
    """What Serve runs, in a process of its own.

    Serve awaits ``__del__`` when it stops a replica; elsewhere that would be no destructor.
    """

    def __init__(self, pool: str, make_worker: WorkerFactory, max_ongoing_requests: int) -> None:
        quieten_replica_log()
        super().__init__(pool, make_worker, max_ongoing_requests)

    async def __del__(self) -> None:
        if hasattr(self, "_worker"):  # else the constructor failed, and has said why
            await self.close()


class _Loads:
    """Says when a stream's items should repeat the replica's load: the first does, and then one now and again."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._due_s = 0.0

    def if_due(self) -> ReplicaLoad | None:
        now_s = time.monotonic()
        if now_s < self._due_s:
            return None
        self._due_s = now_s + LOAD_INTERVAL_S
        return self._worker.load()
