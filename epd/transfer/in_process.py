"""Peers in the same process: fused stages, local mode and tests. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from typing import Any, Protocol

import torch

from epd.errors import HandleExpiredError, PeerGoneError
from epd.transfer.base import EmbeddingConnector, KVConnector
from epd.types import KVTarget

__all__ = ["InProcessPeers"]

_Connector = KVConnector | EmbeddingConnector


class Writer(Protocol):
    """A replica that prefills, as one that decodes sees it."""

    def push_to(self, leg_id: str, target: KVTarget) -> bool: ...

    async def stop_push(self, target_id: str) -> None: ...


class InProcessPeers:
    """A ``PeerClient`` over the connectors of replicas that live in this process, added as they start."""

    def __init__(self) -> None:
        self._replicas: dict[str, tuple[KVConnector | None, EmbeddingConnector | None]] = {}
        self._writers: dict[str, Writer] = {}

    def add(
        self,
        owner: str,
        kv: KVConnector | None,
        embedding: EmbeddingConnector | None,
        writer: Writer | None = None,
    ) -> None:
        self._replicas[owner] = (kv, embedding)
        if writer is not None:
            self._writers[owner] = writer

    def remove(self, owner: str) -> None:
        """Forget a replica that is gone: from now on calls to it raise ``PeerLostError``."""
        self._replicas.pop(owner, None)
        self._writers.pop(owner, None)

    async def read(self, owner: str, handle_id: str, first: int, count: int) -> torch.Tensor:
        """See ``PeerClient``. The copy is made in a thread, which holds the claim."""

        values: torch.Tensor = await asyncio.to_thread(
            self._ask, owner, handle_id, methodcaller("read", handle_id, first, count)
        )
        return values

    async def renew(self, owner: str, handle_ids: Sequence[str]) -> None:
        for handle_id in handle_ids:
            self._ask(owner, handle_id, methodcaller("renew", handle_id))

    async def release(self, owner: str, handle_ids: Sequence[str]) -> None:
        for connector in self._connectors(owner):
            for handle_id in handle_ids:
                connector.release(handle_id)

    async def push_to(self, replica_id: str, leg_id: str, target: KVTarget) -> bool:
        return self._writer(replica_id).push_to(leg_id, target)

    async def stop_push(self, replica_id: str, target_id: str) -> None:
        await self._writer(replica_id).stop_push(target_id)

    def _writer(self, replica_id: str) -> Writer:
        if replica_id not in self._writers:
            raise PeerGoneError(f"replica {replica_id} is not in this process")
        return self._writers[replica_id]

    def _ask(self, owner: str, handle_id: str, question: Callable[[_Connector], Any]) -> Any:
        """Ask each connector of a replica in turn: the one that knows the handle answers."""
        for connector in self._connectors(owner):
            try:
                return question(connector)
            except HandleExpiredError:
                continue
        raise HandleExpiredError(f"handle {handle_id} was released or its lease ran out")

    def _connectors(self, owner: str) -> Iterator[_Connector]:
        if owner not in self._replicas:
            raise PeerGoneError(f"replica {owner} is not in this process")
        yield from (connector for connector in self._replicas[owner] if connector is not None)
