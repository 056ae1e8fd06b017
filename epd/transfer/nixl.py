"""Connectors over NIXL: a fetcher reads the owner's memory one-sidedly, straight from its KV tensor or slab, and a
prefill replica writes KV blocks into a decode replica's.

Owns what the transport bytes of handles, targets and introductions say. How a read proves that the lease held is told
in ``epd.transfer.nixl_endpoint``; renewal and release travel as control calls, which are not made here. Importing this
does not import ``nixl``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from epd.cache.kv_cache import KVCache
from epd.errors import IncompatiblePeerError, TransferError
from epd.transfer.base import FetchResult
from epd.transfer.finish import finish
from epd.transfer.moves import Run, Runs, block_runs, plan_moves, skip_bytes
from epd.transfer.nixl_agent import Region
from epd.transfer.nixl_endpoint import LeaseWord, NixlEndpoint, PeerMemory
from epd.transfer.owner import EmbeddingOwner, KVOwner
from epd.transfer.slab import EmbeddingSlab
from epd.transfer.targets import TargetTable
from epd.types import EmbeddingHandle, KVHandle, KVTarget

__all__ = ["NixlEmbeddingConnector", "NixlKVConnector"]

BACKEND = "nixl"

_LANDED = b"landed:"
"""What a notice starts with; the target's id follows."""
_END_OF_HEAD = b"\n"
_DOORBELL_BYTES = 8
_FIRST_PAUSE_S = 0.0005
_LAST_PAUSE_S = 0.004


class NixlKVConnector(KVOwner):
    """See ``epd.transfer.base.KVConnector``. Registers the KV tensor with the endpoint, once."""

    backend = BACKEND
    supports_push = True

    def __init__(
        self,
        endpoint: NixlEndpoint,
        kv_cache: KVCache,
        lease_s: float,
        clock: Callable[[], float],
        *,
        landing_timeout_s: float = 10.0,
    ) -> None:
        """``landing_timeout_s`` bounds how long ``landed`` waits for a writer's notice."""
        super().__init__(endpoint.owner, kv_cache, lease_s, clock)
        self._endpoint = endpoint
        self._region = endpoint.register(kv_cache.blocks)
        self._landing_timeout_s = landing_timeout_s
        self._targets = TargetTable()
        self._is_collecting = False

    def introduction(self) -> bytes:
        head = {"owner": self.owner, "backend": self.backend, "layout": self._kv_cache.layout}
        word, region, doorbell = self._endpoint.hello
        memory = _pack(self._endpoint, word, region, np.array([doorbell]))
        return json.dumps(head).encode() + _END_OF_HEAD + memory

    async def meet(self, introduction: bytes) -> None:
        head, _, memory = introduction.partition(_END_OF_HEAD)
        try:
            fields = json.loads(head)
            owner, backend, layout = str(fields["owner"]), str(fields["backend"]), str(fields["layout"])
        except (ValueError, KeyError, TypeError) as error:
            raise IncompatiblePeerError(
                "a replica introduces itself in a way that is not understood here: "
                "check that all replicas run the same version"
            ) from error
        self._check_peer(owner, backend, layout)
        if owner != self.owner:
            offer = _unpack(owner, "introduction", memory, _DOORBELL_BYTES)
            await self._endpoint.meet(offer.memory, Run(*offer.runs[0].tolist()))

    # -- pull ----------------------------------------------------------------------------------------------------------

    def publish(
        self, block_ids: Sequence[int], num_tokens: int, rotary_delta: int, on_free: Callable[[], None]
    ) -> KVHandle:
        word = self._endpoint.lend_word()

        def revoke_and_free() -> None:
            word.revoke()
            on_free()

        try:
            transport = _pack(self._endpoint, word, self._region, self._runs(block_ids))
            return self._lend(block_ids, num_tokens, rotary_delta, revoke_and_free, transport)
        except BaseException:
            word.revoke()
            raise

    async def fetch(self, handle: KVHandle, into: Sequence[int], first_block: int = 0) -> FetchResult:
        self._check_fetch(handle, into, first_block)
        if not into:
            return FetchResult(0)
        num_bytes = len(into) * self._kv_cache.block_bytes
        if handle.owner == self.owner:
            await finish(asyncio.to_thread(self._copy_own, handle.handle_id, into, first_block))
            return FetchResult(num_bytes)
        offer = _unpack(handle.owner, f"handle {handle.handle_id}", handle.transport, handle.nbytes)
        remote = skip_bytes(offer.runs, first_block * self._kv_cache.block_bytes)
        await self._endpoint.read_into(offer.memory, plan_moves(remote, self._runs(into)), self._region)
        return FetchResult(num_bytes)

    def _copy_own(self, handle_id: str, into: Sequence[int], first_block: int) -> None:
        self._write(into, self.read(handle_id, first_block, len(into)))

    # -- push ----------------------------------------------------------------------------------------------------------

    @property
    def num_targets(self) -> int:
        return len(self._targets)

    def accept(self, into: Sequence[int], first_block: int) -> KVTarget:
        self._check_blocks(into)
        word = self._endpoint.lend_word()
        try:
            transport = _pack(self._endpoint, word, self._region, self._runs(into))
            target_id = self._targets.open(into, word.revoke)
        except BaseException:
            word.revoke()
            raise
        return KVTarget(target_id, self.owner, self.backend, self._kv_cache.layout, first_block, len(into), transport)

    async def landed(self, target_id: str) -> None:
        # The library keeps notices until it is asked: by one waiter at a time, and ever more rarely, so that waiting
        # costs next to nothing; in a thread if it is copying a batch, since then it makes one wait.
        deadline_s = time.monotonic() + self._landing_timeout_s
        pause_s = _FIRST_PAUSE_S
        while not self._targets.has_landed(target_id):
            if not self._is_collecting:
                self._is_collecting = True
                try:
                    if self._endpoint.is_busy:
                        await asyncio.to_thread(self._collect_notices)
                    else:
                        self._collect_notices()
                finally:
                    self._is_collecting = False
                if self._targets.has_landed(target_id):
                    return
            if time.monotonic() > deadline_s:
                raise TransferError(
                    f"KV blocks pushed to replica {self.owner} are not complete: no notice within "
                    f"{self._landing_timeout_s} s"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def close_target(self, target_id: str) -> None:
        self._targets.close(target_id)

    async def push(self, target: KVTarget, block_ids: Sequence[int], first_block: int, *, is_last: bool) -> int:
        self._check_push(target, block_ids, first_block, is_last)
        num_skipped = min(max(0, target.first_block - first_block), len(block_ids))
        own = block_ids[num_skipped:]
        if not own and not is_last:
            return 0
        offset = max(0, first_block - target.first_block)
        if target.owner == self.owner:
            await finish(asyncio.to_thread(self._copy_to_own, target.target_id, own, offset, is_last))
        else:
            num_bytes = target.num_blocks * self._kv_cache.block_bytes
            offer = _unpack(target.owner, f"target {target.target_id}", target.transport, num_bytes)
            moves = plan_moves(skip_bytes(offer.runs, offset * self._kv_cache.block_bytes), self._runs(own))
            notice = _LANDED + target.target_id.encode() if is_last else b""
            await self._endpoint.write_from(offer.memory, moves, self._region, notice)
        return len(own) * self._kv_cache.block_bytes

    def expire(self) -> int:
        self._endpoint.sweep()
        return super().expire()

    def close(self) -> None:
        super().close()
        self._targets.close_all()

    def _copy_to_own(self, target_id: str, block_ids: Sequence[int], offset: int, is_last: bool) -> None:
        into = self._targets.block_ids(target_id)[offset : offset + len(block_ids)]
        if block_ids:
            self._write(into, self._kv_cache.blocks.index_select(0, self._index(block_ids)))
        if is_last:
            self._targets.note_landed([target_id])

    def _collect_notices(self) -> None:
        notices = self._endpoint.take_notices()
        self._targets.note_landed(
            notice.removeprefix(_LANDED).decode(errors="replace") for notice in notices if notice.startswith(_LANDED)
        )

    def _runs(self, block_ids: Sequence[int]) -> Runs:
        return block_runs(block_ids, self._region.address, self._kv_cache.block_bytes)


class NixlEmbeddingConnector(EmbeddingOwner):
    """See ``epd.transfer.base.EmbeddingConnector``. Registers the slab with the endpoint, once."""

    backend = BACKEND

    def __init__(
        self, endpoint: NixlEndpoint, slab: EmbeddingSlab, layout: str, lease_s: float, clock: Callable[[], float]
    ) -> None:
        super().__init__(endpoint.owner, slab, layout, lease_s, clock)
        self._endpoint = endpoint
        self._region = endpoint.register(slab.memory) if slab.memory.nbytes else None

    def publish(self, mm_hash: str, values: torch.Tensor) -> EmbeddingHandle:
        stored = self._slab.add(mm_hash, values)
        assert self._region is not None, "an empty slab has no room for anything"
        try:
            word = self._endpoint.lend_word()
        except BaseException:
            self._slab.drop(stored)
            raise

        def revoke_and_drop() -> None:
            word.revoke()
            self._slab.drop(stored)

        try:
            runs = np.array([Run(self._region.address + stored.offset_bytes, stored.values.nbytes)])
            return self._lend(stored, revoke_and_drop, _pack(self._endpoint, word, self._region, runs))
        except BaseException:
            revoke_and_drop()
            raise

    async def fetch(self, handle: EmbeddingHandle) -> torch.Tensor:
        self._check_fetch(handle)
        if handle.owner == self.owner:
            return self.read(handle.handle_id, 0, handle.num_tokens)
        offer = _unpack(handle.owner, f"handle {handle.handle_id}", handle.transport, handle.nbytes)
        values = torch.empty((handle.num_tokens, self._slab.width), dtype=self._slab.dtype)
        await self._endpoint.check_lease(offer.memory)
        await self._read_rows(offer, values)
        await self._endpoint.check_lease(offer.memory)
        return values.to(self._slab.memory.device)

    def expire(self) -> int:
        self._endpoint.sweep()
        return super().expire()

    async def _read_rows(self, offer: _Offer, values: torch.Tensor) -> None:
        await self._endpoint.read_bytes(offer.memory, int(offer.runs[0, 0]), values.view(torch.uint8).view(-1))


@dataclass(frozen=True, slots=True)
class _Offer:
    """What transport bytes say: how to reach the memory, and which ranges of it."""

    memory: PeerMemory
    runs: Runs


# Magic, word, nonce, device; then the lengths of what follows: kind, agent, description, runs.
_HEAD = struct.Struct("<4sQQiHHII")
_MAGIC = b"epd1"


def _pack(endpoint: NixlEndpoint, word: LeaseWord, region: Region, runs: Runs) -> bytes:
    parts = (region.kind.encode(), endpoint.name.encode(), endpoint.description, runs.astype("<i8").tobytes())
    head = _HEAD.pack(_MAGIC, word.address, word.nonce, region.device, *(len(part) for part in parts))
    return b"".join((head, *parts))


def _unpack(owner: str, claim: str, transport: bytes, num_bytes: int) -> _Offer:
    """Read what ``owner`` packed for a claim of ``num_bytes``; raise ``IncompatiblePeerError`` if it cannot be that."""
    try:
        magic, word_address, nonce, device, *lengths = _HEAD.unpack_from(transport)
        kind_end, agent_end, description_end, end = itertools.accumulate([_HEAD.size + lengths[0], *lengths[1:]])
        if magic != _MAGIC or len(transport) != end:
            raise ValueError("cut short, or something else")
        memory = PeerMemory(
            owner=owner,
            claim=claim,
            agent=transport[kind_end:agent_end].decode(),
            description=transport[agent_end:description_end],
            word_address=word_address,
            nonce=nonce,
            memory=(transport[_HEAD.size : kind_end].decode(), device),
        )
        runs = np.frombuffer(transport[description_end:], dtype="<i8").reshape(-1, 2).astype(np.int64)
    except (struct.error, ValueError) as error:
        raise IncompatiblePeerError(
            f"replica {owner} describes its memory in a way that is not understood here: "
            "check that both replicas run the same version"
        ) from error
    if (offered_bytes := int(runs[:, 1].sum())) != num_bytes:
        raise IncompatiblePeerError(
            f"replica {owner} offers {offered_bytes} bytes where {num_bytes} are due: "
            "check that both replicas run the same version"
        )
    return _Offer(memory, runs)
