"""Has replicas connect to one another ahead of their first transfer, which would else pay for it.

Knows which replicas are new, and that KV blocks move between those that prefill and those that decode. A replica that
could not be introduced is connected to by its first transfer. Knows nothing of Ray or transports: how a replica is
asked is injected. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from epd.types import ReplicaLoad, Stage

_LOG = logging.getLogger(__name__)
_MAX_CALLS = 8

Ask = Callable[..., Awaitable[Any]]
"""``ask(replica_id, method, *args)``; raises when the replica does not answer."""


class Introductions:
    """See the module. Several ingress replicas may do the same: meeting twice does no harm."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._calls = asyncio.Semaphore(_MAX_CALLS)
        self._introductions: dict[str, bytes] = {}
        self._roles: dict[str, frozenset[Stage]] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    def notice(self, loads: Iterable[ReplicaLoad]) -> None:
        """Introduce the replicas that were not there before, in the background."""
        roles = {load.replica_id: load.roles for load in loads if load.roles & {Stage.PREFILL, Stage.DECODE}}
        new = [replica_id for replica_id in roles if replica_id not in self._roles]
        self._roles = roles
        if new:
            task = asyncio.create_task(self._introduce(new))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def close(self) -> None:
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _introduce(self, new: list[str]) -> None:
        answers = await asyncio.gather(*(self._try(replica_id, "introduction") for replica_id in new))
        known = {each: text for each, text in self._introductions.items() if each in self._roles}
        self._introductions = known | {each: text for each, text in zip(new, answers, strict=True) if text}
        meetings = [
            self._try(one, "meet", self._introductions[other])
            for one in self._introductions
            for other in self._introductions
            if (one in new or other in new) and self._exchange_blocks(one, other)
        ]
        await asyncio.gather(*meetings)

    def _exchange_blocks(self, one: str, other: str) -> bool:
        ours, theirs = self._roles.get(one, frozenset()), self._roles.get(other, frozenset())
        is_pair = (Stage.PREFILL in ours and Stage.DECODE in theirs) or (
            Stage.DECODE in ours and Stage.PREFILL in theirs
        )
        return one != other and is_pair

    async def _try(self, replica_id: str, method: str, *args: Any) -> Any:
        async with self._calls:
            try:
                return await self._ask(replica_id, method, *args)
            except Exception as error:  # of the replica, of Serve or a time-out: no reason to stop the others
                _LOG.info("%s was not introduced: %s: %s", replica_id, type(error).__name__, error)
                return None
