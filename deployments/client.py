"""Calls to one replica over Serve handles: ``RayStageClient`` from the ingress, ``RayPeerClient`` between replicas.

How things travel:

* stage calls and token streams: gRPC handles (``_by_reference=False``). They are several times faster for small
  messages, and a call whose caller was killed is cancelled at once. Tokens of several streams travel together
  (``deployments.token_channel``);
* media bytes over ``INLINE_BYTES``: put into the object store once by the ingress, which holds them to the end of the
  request, then handed to the callee ahead of the call, as top-level arguments of a by-reference call (a *nested*
  reference over gRPC would leak its object);
* data read from a peer: a by-reference call's return value, i.e. through the object store.

Knows nothing of placement or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import ray
from ray import serve
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.handle import DeploymentHandle

from deployments.failures import translated
from deployments.messages import ChannelMessage, Payloads, ReplicaAddress, Reply, StreamItem
from deployments.token_channel import ChannelLostError, Lane, TokenChannel
from epd.errors import EpdError, PeerGoneError, PeerLostError, StageFailedError
from epd.types import (
    DecodeSource,
    EmbeddingHandle,
    Encoded,
    KVTarget,
    Prefilled,
    Prompt,
    ReplicaLoad,
    Request,
    Stage,
    TokenChunk,
)

if TYPE_CHECKING:
    import torch

INLINE_BYTES = 1 << 20
CONTROL_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
PROCESS_END_S = 10.0
"""Ray counts an actor as dead once it has been told to end; within this long its process is killed, even if frozen."""

T = TypeVar("T")


def _ignore(load: ReplicaLoad) -> None:
    pass


class ReplicaHandle:
    """A pool's handle, pinned to one replica.

    Calls leave outside of Serve's request context. Inside it, Serve cancels them itself when a client disconnects,
    which arrives before this side is cancelled and looks like the loss of the replica. ``on_load`` gets the loads that
    come with the token streams of several requests together.
    """

    def __init__(
        self, handle: DeploymentHandle, address: ReplicaAddress, on_load: Callable[[ReplicaLoad], None] = _ignore
    ) -> None:
        self.address = address
        small = {"session_id": address.unique_id, "_by_reference": False}
        small |= {"request_serialization": "pickle", "response_serialization": "pickle"}
        self._small = handle.options(**small)
        self._streaming = handle.options(**small, stream=True)
        self._bulk = handle.options(session_id=address.unique_id, _by_reference=True)
        self.channel = TokenChannel(self._outputs, detach, on_load)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a unary method over gRPC. Cancelling this cancels the remote call."""
        return await _settled(_sent(self._small, method, args))

    async def call_bulk(self, method: str, *args: Any) -> Any:
        """Call a unary method by reference: big arguments or a big result, through the object store."""
        return await _settled(_sent(self._bulk, method, args))

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any]:
        """Iterate a generator method. Closing this iterator, however it ends, cancels the remote generator."""
        items = _sent(self._streaming, method, args)
        is_finished = False
        try:
            async for item in items:
                yield item
            is_finished = True
        finally:
            if not is_finished:
                items.cancel()

    def _outputs(self, channel_id: str) -> AsyncGenerator[ChannelMessage]:
        return self.stream("outputs", channel_id)


def _sent(handle: DeploymentHandle, method: str, args: tuple[Any, ...]) -> Any:
    return contextvars.Context().run(handle.options(method_name=method).remote, *args)


async def _settled(response: Any) -> Any:
    try:
        return await response
    except BaseException:
        # Also on errors: a time-out leaves the remote call running. Cancelling a finished call does nothing.
        response.cancel()
        raise


class PayloadStore:
    """The media bytes of one request in the object store, each item put there at most once, held until closed."""

    def __init__(self) -> None:
        self._puts: dict[int, asyncio.Task[ray.ObjectRef]] = {}

    async def ref(self, index: int, data: bytes) -> ray.ObjectRef:
        """Return the reference of an item; the copy into the object store is made off the event loop."""
        if index not in self._puts:
            self._puts[index] = asyncio.create_task(asyncio.to_thread(ray.put, data))
        return await asyncio.shield(self._puts[index])

    def close(self) -> None:
        self._puts.clear()


class RayStageClient:
    """A replica as a ``StageClient``. One per request and replica; ``on_load`` gets the loads that replies carry."""

    def __init__(
        self,
        replica: ReplicaHandle,
        store: PayloadStore,
        *,
        on_load: Callable[[ReplicaLoad], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._replica = replica
        self._store = store
        self._on_load = on_load
        self._on_lost = on_lost

    async def encode(self, request: Request, payloads: Mapping[int, bytes]) -> Encoded:
        with translated(self._lost(Stage.ENCODE)):
            async with self._sent(payloads) as sent:
                reply: Reply[Encoded] = await self._replica.call("encode", request, sent)
                return self._taken(reply)

    async def prefill(self, request: Request, prompt: Prompt, payloads: Mapping[int, bytes]) -> Prefilled:
        with translated(self._lost(Stage.PREFILL)):
            async with self._sent(payloads) as sent:
                reply: Reply[Prefilled] = await self._replica.call("prefill", request, prompt, sent)
                return self._taken(reply)

    async def decode(
        self, request: Request, source: DecodeSource, payloads: Mapping[int, bytes]
    ) -> AsyncGenerator[tuple[TokenChunk, ...]]:
        with translated(self._lost(Stage.DECODE)):
            try:
                async with self._sent(payloads) as sent, self._lane(request, source, sent) as lane:
                    async for chunks in lane.items():
                        yield chunks
            except ChannelLostError as error:
                raise self._lost(Stage.DECODE)(str(error)) from error

    @contextlib.asynccontextmanager
    async def _lane(self, request: Request, source: DecodeSource, sent: Payloads) -> AsyncIterator[Lane]:
        """Run a decode call into a lane; on leaving, cancel what is left of it."""
        with self._replica.channel.lane() as lane:
            calling = detach(self._call_into(lane, request, source, sent))
            try:
                yield lane
            finally:
                calling.cancel()
                await asyncio.gather(calling, return_exceptions=True)

    async def _call_into(self, lane: Lane, request: Request, source: DecodeSource, sent: Payloads) -> None:
        try:
            stream = self._replica.stream("decode", request, source, sent, lane.address)
            async with contextlib.aclosing(stream) as items:
                async for item in items:
                    assert isinstance(item, StreamItem)
                    if item.load is not None:
                        self._on_load(item.load)
                    lane.put(item.index, item.chunks)
            lane.end()
        except BaseException as error:  # raised again where the lane is read
            lane.end(error)

    async def provide(self, leg_id: str, index: int, handle: EmbeddingHandle) -> bool:
        with translated(self._lost(Stage.PREFILL)):
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                reply: Reply[bool] = await self._replica.call("provide", leg_id, index, handle)
                return self._taken(reply)

    async def resume(self, leg_id: str, prefilled: Prefilled) -> bool:
        with translated(self._lost(Stage.DECODE)):
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                reply: Reply[bool] = await self._replica.call("resume", leg_id, prefilled)
                return self._taken(reply)

    async def release(self, handle_ids: Sequence[str]) -> None:
        """Release, whatever becomes of the caller: a cancelled request must still free its memory."""
        await asyncio.shield(detach(self._release(tuple(handle_ids))))

    async def _release(self, handle_ids: Sequence[str]) -> None:
        # A lost replica holds nothing.
        with contextlib.suppress(StageFailedError), translated(self._lost("release")):
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                self._taken(await self._replica.call("release", handle_ids))

    @contextlib.asynccontextmanager
    async def _sent(self, payloads: Mapping[int, bytes]) -> AsyncIterator[Payloads]:
        """Hand big payloads over ahead of the call; take them back if the call never claims them."""
        if sum(map(len, payloads.values())) <= INLINE_BYTES:
            yield Payloads(inline=tuple(payloads.items()))
            return
        ticket = uuid4().hex
        refs = [await self._store.ref(index, data) for index, data in payloads.items()]
        await self._replica.call_bulk("deposit", ticket, tuple(payloads), *refs)
        try:
            yield Payloads(ticket=ticket)
        except BaseException:
            # Nobody waits for this: a replica that hangs must not hold up the request that leaves it.
            detach(self._discard(ticket))
            raise

    async def _discard(self, ticket: str) -> None:
        with contextlib.suppress(Exception):  # a ticket that cannot be taken back expires
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                await self._replica.call("discard", ticket)

    def _taken(self, reply: Reply[T]) -> T:
        self._on_load(reply.load)
        return reply.value

    def _lost(self, stage: str) -> Callable[[str], EpdError]:
        def lost(reason: str) -> EpdError:
            self._on_lost(str(self._replica.address))
            return StageFailedError(stage, f"replica {self._replica.address}: {reason}")

        return lost


class RayPeerClient:
    """Control calls and reads between the replicas of one application (``epd.transfer.base.PeerClient``)."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name
        self._replicas: dict[str, ReplicaHandle] = {}
        self._handles: dict[str, DeploymentHandle] = {}

    async def read(self, owner: str, handle_id: str, first: int, count: int) -> torch.Tensor:
        with translated(_peer_lost(owner)):
            async with asyncio.timeout(READ_TIMEOUT_S):
                values: torch.Tensor = await self._replica(owner).call_bulk("read", handle_id, first, count)
        return values

    async def renew(self, owner: str, handle_ids: Sequence[str]) -> None:
        with translated(_peer_lost(owner)):
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                await self._replica(owner).call("renew", tuple(handle_ids))

    async def release(self, owner: str, handle_ids: Sequence[str]) -> None:
        async def release() -> None:
            with translated(_peer_lost(owner)):
                async with asyncio.timeout(CONTROL_TIMEOUT_S):
                    await self._replica(owner).call("release", tuple(handle_ids))

        await asyncio.shield(detach(release()))

    async def push_to(self, replica_id: str, leg_id: str, target: KVTarget) -> bool:
        with translated(_peer_lost(replica_id)):
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                return bool(await self._replica(replica_id).call("push_to", leg_id, target))

    async def stop_push(self, replica_id: str, target_id: str) -> None:
        try:
            with translated(_peer_lost(replica_id)):
                async with asyncio.timeout(CONTROL_TIMEOUT_S):
                    await self._replica(replica_id).call("stop_push", target_id)
        except PeerLostError as error:
            if not await asyncio.to_thread(_has_ended, ReplicaAddress.parse(replica_id), self._app_name):
                raise
            await asyncio.sleep(PROCESS_END_S)
            raise PeerGoneError(f"replica {replica_id} has ended") from error

    def _replica(self, owner: str) -> ReplicaHandle:
        if owner not in self._replicas:
            address = ReplicaAddress.parse(owner)
            if address.pool not in self._handles:
                self._handles[address.pool] = serve.get_deployment_handle(address.pool, self._app_name)
            self._replicas[owner] = ReplicaHandle(self._handles[address.pool], address)
        return self._replicas[owner]


def _peer_lost(owner: str) -> Callable[[str], EpdError]:
    return lambda reason: PeerLostError(f"replica {owner}: {reason}")


def _has_ended(address: ReplicaAddress, app_name: str) -> bool:
    """Whether Ray knows a replica's process to have ended. That Serve no longer routes to it is no proof: it may be
    draining, or frozen. Blocks."""
    replica_id = ReplicaID(address.unique_id, DeploymentID(address.pool, app_name))
    try:
        ray.get_actor(replica_id.to_full_id_str(), namespace=SERVE_NAMESPACE)
    except ValueError:
        return True
    return False


def detach(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a call outside the current request: neither its cancellation nor its Serve context reaches it."""
    task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
    _DETACHED.add(task)
    task.add_done_callback(_DETACHED.discard)
    return task


_DETACHED: set[asyncio.Task[Any]] = set()
"""The loop holds tasks weakly; these must finish."""
