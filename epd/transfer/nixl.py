"""Connectors over NIXL: the fetcher reads the owner's memory one-sidedly, straight from its KV tensor or slab.

Owns what a handle's transport bytes say. How a read proves that the lease held is told in
``epd.transfer.nixl_endpoint``; renewal and release travel as control calls, which are not made here. Importing this
does not import ``nixl``.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from epd.cache.kv_cache import KVCache
from epd.errors import IncompatiblePeerError
from epd.transfer.base import FetchResult
from epd.transfer.finish import finish
from epd.transfer.moves import Move, Run, block_runs, plan_moves, skip_bytes
from epd.transfer.nixl_agent import Region
from epd.transfer.nixl_endpoint import LeaseWord, NixlEndpoint, Source
from epd.transfer.owner import EmbeddingOwner, KVOwner
from epd.transfer.slab import EmbeddingSlab
from epd.types import EmbeddingHandle, Handle, KVHandle

__all__ = ["NixlEmbeddingConnector", "NixlKVConnector"]

BACKEND = "nixl"


class NixlKVConnector(KVOwner):
    """See ``epd.transfer.base.KVConnector``. Registers the KV tensor with the endpoint, once."""

    backend = BACKEND

    def __init__(self, endpoint: NixlEndpoint, kv_cache: KVCache, lease_s: float, clock: Callable[[], float]) -> None:
        super().__init__(endpoint.owner, kv_cache, lease_s, clock)
        self._endpoint = endpoint
        self._region = endpoint.register(kv_cache.blocks)

    def publish(
        self, block_ids: Sequence[int], num_tokens: int, rotary_delta: int, on_free: Callable[[], None]
    ) -> KVHandle:
        runs = block_runs(block_ids, self._region.address, self._kv_cache.block_bytes)
        word = self._endpoint.lend_word()

        def revoke_and_free() -> None:
            word.revoke()
            on_free()

        try:
            transport = _pack(self._endpoint, word, self._region, runs)
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
        offer = _unpack(handle)
        remote = list(skip_bytes(offer.runs, first_block * self._kv_cache.block_bytes))
        local = block_runs(into, self._region.address, self._kv_cache.block_bytes)
        await self._endpoint.check_lease(offer.source)
        await self._read_blocks(offer.source, plan_moves(remote, local))
        await self._endpoint.check_lease(offer.source)
        return FetchResult(num_bytes)

    def expire(self) -> int:
        self._endpoint.sweep()
        return super().expire()

    async def _read_blocks(self, source: Source, moves: Sequence[Move]) -> None:
        await self._endpoint.read_into(source, moves, self._region)

    def _copy_own(self, handle_id: str, into: Sequence[int], first_block: int) -> None:
        self._write(into, self.read(handle_id, first_block, len(into)))


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
            run = Run(self._region.address + stored.offset_bytes, stored.values.nbytes)
            return self._lend(stored, revoke_and_drop, _pack(self._endpoint, word, self._region, [run]))
        except BaseException:
            revoke_and_drop()
            raise

    async def fetch(self, handle: EmbeddingHandle) -> torch.Tensor:
        self._check_fetch(handle)
        if handle.owner == self.owner:
            return self.read(handle.handle_id, 0, handle.num_tokens)
        offer = _unpack(handle)
        values = torch.empty((handle.num_tokens, self._slab.width), dtype=self._slab.dtype)
        await self._endpoint.check_lease(offer.source)
        await self._read_rows(offer, values)
        await self._endpoint.check_lease(offer.source)
        return values.to(self._slab.memory.device)

    def expire(self) -> int:
        self._endpoint.sweep()
        return super().expire()

    async def _read_rows(self, offer: _Offer, values: torch.Tensor) -> None:
        await self._endpoint.read_bytes(offer.source, offer.runs[0].address, values.view(torch.uint8).view(-1))


@dataclass(frozen=True, slots=True)
class _Offer:
    """What transport bytes say: how to reach the memory, and which ranges of it."""

    source: Source
    runs: list[Run]


_LENGTHS = struct.Struct("<HII")  # of the header, the agent's description, and the list of runs
_RUN = struct.Struct("<QQ")


def _pack(endpoint: NixlEndpoint, word: LeaseWord, region: Region, runs: Sequence[Run]) -> bytes:
    header = {
        "agent": endpoint.name,
        "word": word.address,
        "nonce": word.nonce,
        "kind": region.kind,
        "device": region.device,
    }
    head = json.dumps(header).encode()
    packed_runs = b"".join(_RUN.pack(run.address, run.num_bytes) for run in runs)
    lengths = _LENGTHS.pack(len(head), len(endpoint.description), len(packed_runs))
    return lengths + head + endpoint.description + packed_runs


def _unpack(handle: Handle) -> _Offer:
    """Raises ``IncompatiblePeerError`` for bytes that another version wrote."""
    try:
        head_bytes, description_bytes, runs_bytes = _LENGTHS.unpack_from(handle.transport)
        head_end = _LENGTHS.size + head_bytes
        description_end = head_end + description_bytes
        header = json.loads(handle.transport[_LENGTHS.size : head_end])
        source = Source(
            owner=handle.owner,
            handle_id=handle.handle_id,
            agent=header["agent"],
            description=handle.transport[head_end:description_end],
            word_address=header["word"],
            nonce=header["nonce"],
            memory=(header["kind"], header["device"]),
        )
        packed_runs = handle.transport[description_end : description_end + runs_bytes]
        runs = [Run(*fields) for fields in _RUN.iter_unpack(packed_runs)]
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise IncompatiblePeerError(
            f"replica {handle.owner} describes its memory in a way that is not understood here: "
            "check that both replicas run the same version"
        ) from error
    if sum(run.num_bytes for run in runs) != handle.nbytes:
        raise IncompatiblePeerError(
            f"replica {handle.owner} offers {sum(run.num_bytes for run in runs)} bytes under a handle of "
            f"{handle.nbytes}: check that both replicas run the same version"
        )
    return _Offer(source, runs)
