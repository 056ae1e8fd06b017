"""The contracts of the data plane: who publishes memory, who fetches it, and who owns it when.

A **connector** moves one kind of data between two replicas. The owner ``publish``es and gets a small picklable handle;
whoever holds the handle ``fetch``es into its own memory; the owner frees on ``release`` or when the lease runs out.

    owner                                    fetcher
    ─────                                    ───────
    publish(data) -> handle  ── handle ──>   fetch(handle, into) -> FetchResult
    renew(handle_id)         <── control ──  renews while it waits in a queue
    release(handle_id)       <── control ──  whoever drives the request, on every exit path
    expire()                                 the owner's reaper, for the dead

A one-sided read can complete with *new* bytes after the owner reused the memory. Therefore a fetch that returns has
proven, after its last byte arrived, that the lease still held; otherwise it raises ``HandleExpiredError`` and what it
wrote does not count.

KV blocks can also be **pushed** while later ones are still computed, by a connector that ``supports_push``:

    decode replica (owns the target)         prefill replica (writes)
    ────────────────────────────────         ────────────────────────
    accept(blocks) -> target ── control ──>  push(target, blocks), ..., push(target, blocks, is_last=True)
    landed(target_id)        <── notice ───  which follows the last byte
    close_target(target_id)

A one-sided write asks nobody's leave either. Therefore the decode replica keeps the blocks of a target reserved until
``landed`` has returned, or the writer has said that no write is under way and none can start (its ``push`` has
unwound), or the writer is dead. The connector frees no memory and decides none of this: its caller does.

Connectors know nothing of requests, schedulers or Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from epd.types import EmbeddingHandle, KVHandle, KVTarget

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class FetchResult:
    """What a fetch did. ``failed`` lists positions in ``into`` whose contents must not be used."""

    num_bytes: int
    failed: tuple[int, ...] = ()


class PeerClient(Protocol):
    """Control calls to the owner of a handle, and its data when there is no one-sided transport.

    Raises ``PeerLostError`` when the other cannot be reached (``PeerGoneError`` when it has ended), and
    ``HandleExpiredError`` when an owner no longer knows a handle.
    """

    async def read(self, owner: str, handle_id: str, first: int, count: int) -> torch.Tensor:
        """Return a copy of the data: ``count`` blocks from ``first`` on (KV), or rows (embedding).

        The result may be read-only shared memory: never write to it.
        """
        ...

    async def renew(self, owner: str, handle_ids: Sequence[str]) -> None: ...

    async def release(self, owner: str, handle_ids: Sequence[str]) -> None: ...

    async def push_to(self, replica_id: str, leg_id: str, target: KVTarget) -> bool:
        """Tell the replica that prefills a leg where its blocks are wanted; ``False`` if it will write nothing."""
        ...

    async def stop_push(self, replica_id: str, target_id: str) -> None:
        """Return once that replica writes nothing to the target any more, now or later.

        Raises ``PeerGoneError`` when it has ended, which is as good, and ``PeerLostError`` when it does not answer.
        """
        ...


class KVConnector(Protocol):
    """Moves KV blocks. Built over the replica's one KV tensor (see ``epd.cache.kv_cache``), registered once.

    All methods but the asynchronous ones are non-blocking and thread-safe: the engine's thread publishes, the event
    loop releases. Where ``supports_push`` is false, ``accept``, ``landed`` and ``push`` raise ``TransferError``.
    """

    backend: str
    supports_push: bool

    def introduction(self) -> bytes:
        """Return what a peer needs for first contact with this replica; empty where there is nothing to set up."""
        ...

    async def meet(self, introduction: bytes) -> None:
        """Connect to the replica that introduces itself, so that the first transfer does not pay for it. Idempotent.

        A replica that is not met is connected to by the first transfer; one that restarted introduces itself anew.

        Raises ``IncompatiblePeerError`` if the two could never exchange blocks, or ``PeerLostError``.
        """
        ...

    def publish(
        self, block_ids: Sequence[int], num_tokens: int, rotary_delta: int, on_free: Callable[[], None]
    ) -> KVHandle:
        """Lend the blocks out. The connector calls ``on_free`` exactly once, when the claim has ended and no read can
        still be trusted: only then may the blocks be reused."""
        ...

    async def fetch(self, handle: KVHandle, into: Sequence[int], first_block: int = 0) -> FetchResult:
        """Copy blocks ``[first_block, first_block + len(into))`` of the handle into the caller's blocks ``into``.

        The caller owns ``into`` throughout and must not reuse them before this returns, raises or, when cancelled,
        finishes unwinding: a cancelled fetch returns only when nothing can write to them any more.

        Raises ``HandleExpiredError``, ``IncompatiblePeerError`` or ``PeerLostError``.
        """
        ...

    def accept(self, into: Sequence[int], first_block: int) -> KVTarget:
        """Open the caller's reserved blocks ``into`` to one writer, as positions from ``first_block`` on.

        The caller keeps them reserved, and reads nothing from them, until the target may be closed.
        """
        ...

    async def landed(self, target_id: str) -> None:
        """Return once everything is written: the writer's notice has come, which is normally there already.

        Raises ``TransferError`` when it does not come in time, or for a target that is closed.
        """
        ...

    def close_target(self, target_id: str) -> None:
        """Forget a target: a notice that comes later is dropped. Idempotent; unknown ids are ignored.

        This stops nobody from writing: see the module on when the blocks may be reused.
        """
        ...

    async def push(self, target: KVTarget, block_ids: Sequence[int], first_block: int, *, is_last: bool) -> int:
        """Write the caller's blocks, positions ``[first_block, first_block + len(block_ids))``; return the bytes moved.

        Positions before ``target.first_block`` are skipped. With ``is_last`` (``block_ids`` may then be empty) the
        notice follows the data of every push before, so pushes to one target are made one after the other, and after
        one that raised there is no last one. The caller keeps its blocks unchanged until this ends. A cancelled push
        unwinds only when nothing can write any more.

        Raises ``IncompatiblePeerError`` or ``PeerLostError``.
        """
        ...

    def read(self, handle_id: str, first: int, count: int) -> torch.Tensor:
        """Owner side of ``PeerClient.read``: a copy of blocks. Raises ``HandleExpiredError``."""
        ...

    def renew(self, handle_id: str) -> None:
        """Start the lease anew. Raises ``HandleExpiredError``."""
        ...

    def release(self, handle_id: str) -> None:
        """End the claim. Idempotent; unknown ids are ignored."""
        ...

    def expire(self) -> int:
        """End the claims whose lease ran out; return how many. Called by the owner's reaper."""
        ...

    @property
    def num_live(self) -> int: ...

    @property
    def live_bytes(self) -> int: ...

    @property
    def oldest_lease_s(self) -> float:
        """Age of the oldest live claim, since it was published; 0 without any. One that grows is a leak."""
        ...

    @property
    def num_targets(self) -> int:
        """Targets that are open."""
        ...

    def close(self) -> None:
        """End all claims and give the transport's resources back."""
        ...


class EmbeddingConnector(Protocol):
    """Moves embeddings; the same contract over single tensors ``[num_tokens, width]``."""

    backend: str

    def publish(self, mm_hash: str, values: torch.Tensor) -> EmbeddingHandle:
        """Lend an embedding out. The connector copies into (or keeps) its own memory; the caller's tensor is free.

        Publishing an ``mm_hash`` whose bytes are still held shares them: each publish is its own claim.

        Raises ``TransferError`` when live claims leave no room.
        """
        ...

    async def fetch(self, handle: EmbeddingHandle) -> torch.Tensor:
        """Return the embedding as a tensor that the caller owns."""
        ...

    def read(self, handle_id: str, first: int, count: int) -> torch.Tensor: ...

    def renew(self, handle_id: str) -> None: ...

    def release(self, handle_id: str) -> None: ...

    def expire(self) -> int: ...

    @property
    def num_live(self) -> int: ...

    @property
    def live_bytes(self) -> int: ...

    @property
    def oldest_lease_s(self) -> float: ...

    def close(self) -> None: ...
