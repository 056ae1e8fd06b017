"""The owner's side of a connector, the same for every transport: what is lent out, and copies of it.

Knows nothing of how the bytes reach a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from epd.cache.kv_cache import KVCache, differing_parts
from epd.errors import IncompatiblePeerError, TransferError
from epd.transfer.leases import LeaseTable
from epd.transfer.slab import EmbeddingSlab, StoredEmbedding, wait_for_device
from epd.types import EmbeddingHandle, KVHandle, KVTarget

__all__ = ["EmbeddingOwner", "KVOwner"]


class KVOwner:
    """Lends KV blocks out by claims on their ids. Thread-safe. Can be pulled from only, unless a subclass says more."""

    backend: str
    supports_push = False

    def __init__(self, owner: str, kv_cache: KVCache, lease_s: float, clock: Callable[[], float]) -> None:
        self.owner = owner
        self._kv_cache = kv_cache
        self._leases: LeaseTable[tuple[int, ...]] = LeaseTable(lease_s, clock)

    @property
    def num_live(self) -> int:
        return self._leases.num_live

    @property
    def live_bytes(self) -> int:
        return self._leases.live_bytes

    @property
    def oldest_lease_s(self) -> float:
        return self._leases.oldest_s

    @property
    def num_targets(self) -> int:
        return 0

    def introduction(self) -> bytes:
        return b""

    async def meet(self, introduction: bytes) -> None:
        """Nothing has to be set up."""

    def accept(self, into: Sequence[int], first_block: int) -> KVTarget:
        raise self._no_push()

    async def landed(self, target_id: str) -> None:
        raise self._no_push()

    def close_target(self, target_id: str) -> None:
        """There are none."""

    async def push(self, target: KVTarget, block_ids: Sequence[int], first_block: int, *, is_last: bool) -> int:
        raise self._no_push()

    def _no_push(self) -> TransferError:
        return TransferError(f"KV blocks cannot be pushed over {self.backend}, only pulled")

    def read(self, handle_id: str, first: int, count: int) -> torch.Tensor:
        """Return a copy of blocks ``[first, first + count)`` of a handle. Raises ``HandleExpiredError``.

        The claim is held while the copy is made: a release meanwhile takes effect after it.
        """
        with self._leases.hold(handle_id) as block_ids:
            _check_range("blocks", first, count, len(block_ids))
            values = self._kv_cache.blocks.index_select(0, self._index(block_ids[first : first + count]))
            wait_for_device(values)
            return values

    def renew(self, handle_id: str) -> None:
        self._leases.renew(handle_id)

    def release(self, handle_id: str) -> None:
        self._leases.release(handle_id)

    def expire(self) -> int:
        return self._leases.expire()

    def close(self) -> None:
        self._leases.close()

    def _lend(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        rotary_delta: int,
        on_free: Callable[[], None],
        transport: bytes = b"",
    ) -> KVHandle:
        self._check_blocks(block_ids)
        num_bytes = len(block_ids) * self._kv_cache.block_bytes
        return KVHandle(
            handle_id=self._leases.publish(tuple(block_ids), num_bytes, on_free),
            owner=self.owner,
            backend=self.backend,
            nbytes=num_bytes,
            lease_s=self._leases.lease_s,
            layout=self._kv_cache.layout,
            transport=transport,
            num_tokens=num_tokens,
            num_blocks=len(block_ids),
            rotary_delta=rotary_delta,
        )

    def _check_fetch(self, handle: KVHandle, into: Sequence[int], first_block: int) -> None:
        _check_open(self._leases)
        self._check_peer(handle.owner, handle.backend, handle.layout)
        _check_range("blocks", first_block, len(into), handle.num_blocks)
        self._check_blocks(into)

    def _check_push(self, target: KVTarget, block_ids: Sequence[int], first_block: int, is_last: bool) -> None:
        _check_open(self._leases)
        self._check_peer(target.owner, target.backend, target.layout)
        self._check_blocks(block_ids)
        end, target_end = first_block + len(block_ids), target.first_block + target.num_blocks
        if first_block < 0 or end > target_end:
            raise ValueError(f"blocks [{first_block}, {end}) are outside a target that ends at block {target_end}")
        if is_last and end != target_end:
            raise ValueError(f"the last push ends at block {end}, but the target at block {target_end}")

    def _check_peer(self, owner: str, backend: str, layout: str) -> None:
        what = "KV blocks", "engine.block_size, model, revision, dtype and package version"
        _check_peer((owner, backend, layout), (self.owner, self.backend, self._kv_cache.layout), *what)

    def _check_blocks(self, block_ids: Sequence[int]) -> None:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self._kv_cache.num_blocks:
            outside = [block_id for block_id in block_ids if not 0 <= block_id < self._kv_cache.num_blocks]
            raise ValueError(f"blocks {outside[:4]} are outside the cache of {self._kv_cache.num_blocks} blocks")

    def _write(self, into: Sequence[int], values: torch.Tensor) -> None:
        self._kv_cache.blocks.index_copy_(0, self._index(into), values.to(self._kv_cache.blocks.device))
        wait_for_device(self._kv_cache.blocks)

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._kv_cache.blocks.device)


class EmbeddingOwner:
    """Lends embeddings out from a slab of its own. Thread-safe."""

    backend: str

    def __init__(
        self, owner: str, slab: EmbeddingSlab, layout: str, lease_s: float, clock: Callable[[], float]
    ) -> None:
        self.owner = owner
        self._slab = slab
        self._layout = layout
        self._leases: LeaseTable[StoredEmbedding] = LeaseTable(lease_s, clock)

    @property
    def num_live(self) -> int:
        return self._leases.num_live

    @property
    def live_bytes(self) -> int:
        """Bytes of the slab in use: an embedding that several claims share counts once."""
        return self._slab.used_bytes

    @property
    def oldest_lease_s(self) -> float:
        return self._leases.oldest_s

    def read(self, handle_id: str, first: int, count: int) -> torch.Tensor:
        """Return a copy of rows ``[first, first + count)`` of a handle. Raises ``HandleExpiredError``."""
        with self._leases.hold(handle_id) as stored:
            _check_range("rows", first, count, stored.values.shape[0])
            values = stored.values[first : first + count].clone()
            wait_for_device(values)
            return values

    def renew(self, handle_id: str) -> None:
        self._leases.renew(handle_id)

    def release(self, handle_id: str) -> None:
        self._leases.release(handle_id)

    def expire(self) -> int:
        return self._leases.expire()

    def close(self) -> None:
        self._leases.close()

    def _lend(self, stored: StoredEmbedding, on_free: Callable[[], None], transport: bytes = b"") -> EmbeddingHandle:
        return EmbeddingHandle(
            handle_id=self._leases.publish(stored, stored.values.nbytes, on_free),
            owner=self.owner,
            backend=self.backend,
            nbytes=stored.values.nbytes,
            lease_s=self._leases.lease_s,
            layout=self._layout,
            transport=transport,
            mm_hash=stored.mm_hash,
            num_tokens=stored.values.shape[0],
        )

    def _check_fetch(self, handle: EmbeddingHandle) -> None:
        _check_open(self._leases)
        what = "embeddings", "model, revision and dtype"
        _check_peer((handle.owner, handle.backend, handle.layout), (self.owner, self.backend, self._layout), *what)
        expected_bytes = handle.num_tokens * self._slab.width * self._slab.dtype.itemsize
        if handle.nbytes != expected_bytes:
            raise IncompatiblePeerError(
                f"replica {handle.owner} offers an embedding of {handle.nbytes} bytes for {handle.num_tokens} tokens, "
                f"but replica {self.owner} expects {expected_bytes}: check that both run the same version"
            )

    def _dropper(self, stored: StoredEmbedding) -> Callable[[], None]:
        return partial(self._slab.drop, stored)


def _check_open(leases: LeaseTable[Any]) -> None:
    if leases.is_closed:
        raise TransferError("this replica is shutting down and transfers nothing any more")


def _check_peer(theirs: tuple[str, str, str], ours: tuple[str, str, str], what: str, to_check: str) -> None:
    """Compare (owner, backend, layout) of a peer with this replica's. Raises ``IncompatiblePeerError``."""
    (their_name, their_backend, their_layout), (our_name, our_backend, our_layout) = theirs, ours
    if their_backend != our_backend:
        raise IncompatiblePeerError(
            f"replica {their_name} offers {what} over {their_backend}, but replica {our_name} uses {our_backend}: "
            "set args.transfer.backend to one that every replica can use"
        )
    if their_layout != our_layout:
        their_part, our_part = differing_parts(their_layout, our_layout)
        raise IncompatiblePeerError(
            f"replica {their_name} has {what} of {their_part}, but replica {our_name} expects {our_part}: "
            f"check that both run the same {to_check}"
        )


def _check_range(what: str, first: int, count: int, size: int) -> None:
    if first < 0 or count < 0 or first + count > size:
        raise ValueError(f"{what} [{first}, {first + count}) are outside a handle of {size} {what}")
