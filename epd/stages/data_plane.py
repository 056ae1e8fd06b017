"""The memory that a replica lends to others and borrows from them: its connectors, leases and courtesy calls.

Owns the connectors of one replica and the small tasks around them: the reaper for claims of the dead, renewals while
this side waits, and releases after a fetch. Knows nothing of engines, encoders or requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

from epd.errors import EpdError, HandleExpiredError
from epd.transfer.base import EmbeddingConnector, KVConnector, PeerClient
from epd.types import Handle

if TYPE_CHECKING:
    import torch

    from epd.transfer.factory import Connectors

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_RELEASE_TIMEOUT_S = 5.0


class DataPlane:
    """See the module. ``start`` and everything after runs on one event loop, except ``read``."""

    def __init__(self, connectors: Connectors, peers: PeerClient, lease_s: float) -> None:
        self.kv = connectors.kv
        self.embedding = connectors.embedding
        self._connectors = connectors
        self._peers = peers
        self._lease_s = lease_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._reaper: asyncio.Task[None] | None = None

    @property
    def by_kind(self) -> dict[str, KVConnector | EmbeddingConnector]:
        connectors = {"kv": self.kv, "embedding": self.embedding}
        return {kind: connector for kind, connector in connectors.items() if connector is not None}

    def start(self) -> None:
        self._reaper = self.spawn(self._reap())

    async def close(self) -> None:
        """End all claims and give the transport back."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._connectors.close()

    async def settle(self) -> None:
        """Wait for the releases that are on their way."""
        await asyncio.gather(*(task for task in self._tasks if task is not self._reaper), return_exceptions=True)

    # -- lent to others ------------------------------------------------------------------------------------------------

    def release(self, handle_ids: Sequence[str]) -> None:
        """End claims. Unknown ones are ignored."""
        for connector in self.by_kind.values():
            for handle_id in handle_ids:
                connector.release(handle_id)

    def renew(self, handle_ids: Sequence[str]) -> None:
        """Start leases anew. Raises ``HandleExpiredError`` for one that has ended."""
        for handle_id in handle_ids:
            self._ask(methodcaller("renew", handle_id))

    def read(self, handle_id: str, first: int, count: int) -> torch.Tensor:
        """Return a copy of lent memory; see ``PeerClient.read``. Thread-safe."""
        return self._ask(lambda connector: connector.read(handle_id, first, count))

    def _ask(self, ask: Callable[[KVConnector | EmbeddingConnector], T]) -> T:
        """Ask each connector in turn; the one that knows the handle answers."""
        for connector in self.by_kind.values():
            with contextlib.suppress(HandleExpiredError):
                return ask(connector)
        raise HandleExpiredError("the handle was released, or its lease ran out")

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 4)
            for kind, connector in self.by_kind.items():
                if num_expired := connector.expire():
                    _LOG.warning("%d %s leases ran out: their holders are gone", num_expired, kind)

    # -- borrowed from others ------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def kept_alive(self, handle: Handle) -> AsyncIterator[None]:
        """Renew a lease while this side waits or transfers, so that it runs out only for the dead."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(handle.lease_s / 3)
                with contextlib.suppress(EpdError):
                    await self._peers.renew(handle.owner, [handle.handle_id])

        renewing = asyncio.create_task(renew())
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    def release_soon(self, handle: Handle) -> None:
        """Tell the owner that this side is done, without waiting. A lost call leaves it to the lease."""

        async def release() -> None:
            with contextlib.suppress(EpdError, TimeoutError):
                async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                    await self._peers.release(handle.owner, [handle.handle_id])

        self.spawn(release())

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that outlives its request, to the end of the replica at most."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
