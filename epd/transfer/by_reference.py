"""Connectors without a one-sided transport: the fetcher asks the owner for a copy, through any ``PeerClient``.

What carries the copy decides the cost: a function call between replicas of one process, the Ray object store between
processes. The owner holds the claim while it copies, so an answer is never made of reused memory, however late it
arrives. Knows nothing of who the peers are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from epd.cache.kv_cache import KVCache
from epd.errors import IncompatiblePeerError
from epd.transfer.base import FetchResult, PeerClient
from epd.transfer.finish import finish
from epd.transfer.owner import EmbeddingOwner, KVOwner
from epd.transfer.slab import EmbeddingSlab
from epd.types import EmbeddingHandle, KVHandle

__all__ = ["ByReferenceEmbeddingConnector", "ByReferenceKVConnector"]

BACKEND = "object_store"


class ByReferenceKVConnector(KVOwner):
    """See ``epd.transfer.base.KVConnector``."""

    backend = BACKEND

    def __init__(
        self, owner: str, kv_cache: KVCache, peers: PeerClient, lease_s: float, clock: Callable[[], float]
    ) -> None:
        super().__init__(owner, kv_cache, lease_s, clock)
        self._peers = peers
        # A copy of many megabytes would stall the event loop. One thread: memory bandwidth is the limit.
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="epd-kv-copy")

    def publish(
        self, block_ids: Sequence[int], num_tokens: int, rotary_delta: int, on_free: Callable[[], None]
    ) -> KVHandle:
        return self._lend(block_ids, num_tokens, rotary_delta, on_free)

    async def fetch(self, handle: KVHandle, into: Sequence[int], first_block: int = 0) -> FetchResult:
        self._check_fetch(handle, into, first_block)
        if not into:
            return FetchResult(0)
        loop = asyncio.get_running_loop()
        if handle.owner == self.owner:
            # Nothing to abandon: a read whose caller has gone writes to its own copy only.
            values = await loop.run_in_executor(self._copying, self.read, handle.handle_id, first_block, len(into))
        else:
            values = await self._peers.read(handle.owner, handle.handle_id, first_block, len(into))
        expected = (len(into), *self._kv_cache.blocks.shape[1:])
        _check_answer(handle.owner, values, expected, self._kv_cache.blocks.dtype)
        await finish(loop.run_in_executor(self._copying, self._write, into, values))
        return FetchResult(values.nbytes)

    def close(self) -> None:
        super().close()
        self._copying.shutdown(wait=True)


class ByReferenceEmbeddingConnector(EmbeddingOwner):
    """See ``epd.transfer.base.EmbeddingConnector``."""

    backend = BACKEND

    def __init__(
        self,
        owner: str,
        slab: EmbeddingSlab,
        layout: str,
        peers: PeerClient,
        lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(owner, slab, layout, lease_s, clock)
        self._peers = peers

    def publish(self, mm_hash: str, values: torch.Tensor) -> EmbeddingHandle:
        stored = self._slab.add(mm_hash, values)
        try:
            return self._lend(stored, self._dropper(stored))
        except BaseException:
            self._slab.drop(stored)
            raise

    async def fetch(self, handle: EmbeddingHandle) -> torch.Tensor:
        self._check_fetch(handle)
        if handle.owner == self.owner:
            return self.read(handle.handle_id, 0, handle.num_tokens)
        values = await self._peers.read(handle.owner, handle.handle_id, 0, handle.num_tokens)
        _check_answer(handle.owner, values, (handle.num_tokens, self._slab.width), self._slab.dtype)
        # The answer may be read-only memory that others see too.
        return values.to(self._slab.memory.device, copy=True)


def _check_answer(owner: str, values: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(values.shape) != shape or values.dtype != dtype:
        raise IncompatiblePeerError(
            f"replica {owner} answered {list(values.shape)} of {values.dtype}, expected {list(shape)} of {dtype}: "
            "check that both replicas run the same version"
        )
