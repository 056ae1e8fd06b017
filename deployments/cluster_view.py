"""The ingress's view of every replica: who is up, and what each said last of its load.

Loads arrive with replies; replicas that are silent are asked. A replica on which a call failed disappears at once and
comes back when it answers again. Knows nothing of Ray: how a pool is asked is injected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from epd.types import ReplicaLoad

logger = logging.getLogger(__name__)

AskPool = Callable[[str], Awaitable[Sequence[ReplicaLoad]]]
"""Return the loads of the replicas of a pool that answer; raises when the pool cannot be asked."""


class ClusterView:
    """What is known of the replicas of the configured pools. All methods belong to one event loop.

    ``on_poll`` gets all loads after each poll.
    """

    def __init__(
        self,
        pools: Sequence[str],
        ask_pool: AskPool,
        *,
        poll_interval_s: float,
        on_poll: Callable[[Sequence[ReplicaLoad]], None] = lambda loads: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = tuple(pools)
        self._ask_pool = ask_pool
        self._poll_interval_s = poll_interval_s
        self._on_poll = on_poll
        self._clock = clock
        self._loads: dict[str, ReplicaLoad] = {}
        self._polling: asyncio.Task[None] | None = None

    @property
    def loads(self) -> list[ReplicaLoad]:
        """The latest load of every known replica, in the order of the configured pools."""
        order = {pool: index for index, pool in enumerate(self._pools)}
        return sorted(self._loads.values(), key=lambda load: (order[load.pool], load.replica_id))

    @property
    def missing_pools(self) -> list[str]:
        """Configured pools of which no replica is known to answer."""
        present = {load.pool for load in self._loads.values()}
        return [pool for pool in self._pools if pool not in present]

    def update(self, load: ReplicaLoad) -> None:
        """Take in what a replica said just now."""
        self._loads[load.replica_id] = replace(load, reported_at_s=self._clock())

    def drop(self, replica_id: str) -> None:
        """Forget a replica on which a call failed."""
        self._loads.pop(replica_id, None)

    async def refresh(self) -> None:
        """Ask every pool once. A pool that cannot be asked has no replicas."""
        await asyncio.gather(*(self._refresh_pool(pool) for pool in self._pools))

    async def _refresh_pool(self, pool: str) -> None:
        try:
            loads = await self._ask_pool(pool)
        except Exception as error:  # a poller outlives whatever a poll may raise
            logger.warning("pool %s cannot be asked for its load: %s", pool, error)
            loads = ()
        answered = {load.replica_id for load in loads}
        for replica_id in [each.replica_id for each in self._loads.values() if each.pool == pool]:
            if replica_id not in answered:
                self.drop(replica_id)
        for load in loads:
            self.update(load)

    def start(self) -> None:
        """Keep the view fresh from now on; idempotent."""
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll())

    async def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._polling
            self._polling = None

    async def _poll(self) -> None:
        while True:
            await self.refresh()
            self._on_poll(self.loads)
            await asyncio.sleep(self._poll_interval_s)
