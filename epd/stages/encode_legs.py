"""The encode legs of one request: a call for each item that is encoded apart, all at once, beside the leg that waits.

    encoder a  |--item 0--|----item 2----|
    encoder b  |-----item 1-----|
    prefill    |text|..|item 0|...|item 1|item 2|  first token

Owns who encodes what, who takes over from an encoder that failed, and which handles are the request's to release. Knows
nothing of what the other legs do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from epd.errors import EpdError, StageFailedError, TransferError
from epd.stages.tasks import all_or_first_error, unless_fails
from epd.types import EmbeddingHandle, MediaItem, Placement, Request, StageClient, StageReport

T = TypeVar("T")

Reassign = Callable[[int, frozenset[str]], str]
"""Choose another encoder for an item, given those that failed. Raises ``EpdError`` when there is none."""

Deliver = Callable[[int, EmbeddingHandle], Awaitable[bool]]
"""Hand a handle to the leg that needs it; return whether that leg will release it."""


class LegFailed(Exception):  # noqa: N818 - internal: says which replica failed, and is unwrapped before it leaves
    """A call to a replica failed; ``num_failures`` counts the replicas that failed this request by then."""

    def __init__(self, replica_id: str, error: EpdError, num_failures: int = 1) -> None:
        super().__init__(replica_id, error, num_failures)
        self.replica_id = replica_id
        self.error = error
        self.num_failures = num_failures


class EncodeLegs:
    """See the module. ``assigned`` maps item indexes to replica ids."""

    def __init__(
        self,
        request: Request,
        assigned: Mapping[int, str],
        payloads: Mapping[int, bytes],
        client_of: Callable[[str], StageClient],
        reassign: Reassign,
        max_attempts: int,
    ) -> None:
        self.report = StageReport()
        self._request = request
        self._assigned = dict(assigned)
        self._payloads = payloads
        self._client_of = client_of
        self._reassign = reassign
        self._max_attempts = max_attempts
        self._failed: set[str] = set()
        self._published: dict[int, EmbeddingHandle] = {}
        self._taken: set[int] = set()
        self._running: asyncio.Task[None] | None = None

    @property
    def items(self) -> frozenset[int]:
        return frozenset(self._assigned)

    def as_run(self, placement: Placement) -> Placement:
        """Return the placement with the encoders that did the work."""
        if not self._failed:
            return placement
        encode = tuple(self._assigned.get(index, planned) for index, planned in enumerate(placement.encode))
        return replace(placement, encode=encode)

    @property
    def handles(self) -> Sequence[EmbeddingHandle | None]:
        """What has been published, by item."""
        return [self._published.get(item.index) for item in self._request.items]

    def claims(self, *, is_taken_over: bool) -> list[EmbeddingHandle]:
        """Return the handles that this side must release: all, or, once the other leg went well, what it declined."""
        taken = self._taken if is_taken_over else ()
        return [handle for index, handle in self._published.items() if index not in taken]

    async def run(self, deliver: Deliver | None = None) -> None:
        """Encode every item. The first that nobody can encode cancels the others. Raises ``LegFailed``."""
        items = [item for item in self._request.items if item.index in self._assigned]
        await all_or_first_error([self._encode(item, deliver) for item in items])

    async def _encode(self, item: MediaItem, deliver: Deliver | None) -> None:
        handle = await self._encode_somewhere(item)
        if deliver is not None and await deliver(item.index, handle):
            self._taken.add(item.index)

    async def _encode_somewhere(self, item: MediaItem) -> EmbeddingHandle:
        while True:
            replica_id = self._assigned[item.index]
            try:
                client = self._client_of(replica_id)
                encoded = await client.encode(self._request, {item.index: self._payloads[item.index]})
            except (StageFailedError, TransferError) as error:
                self._assigned[item.index] = self._replacement(item, replica_id, error)
            except EpdError as error:  # the request's own fault, or a refusal: elsewhere it would be the same
                raise LegFailed(replica_id, error) from error
            else:
                self.report = self.report + encoded.report
                self._published[item.index] = encoded.handles[0]
                return encoded.handles[0]

    def _replacement(self, item: MediaItem, replica_id: str, error: EpdError) -> str:
        """Return who encodes an item instead of a replica that failed."""
        self._failed.add(replica_id)
        failure = LegFailed(replica_id, error, len(self._failed))
        if len(self._failed) >= self._max_attempts:
            raise failure from error
        try:
            return self._reassign(item.index, frozenset(self._failed))
        except EpdError:
            raise failure from error

    # -- beside another leg --------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self, deliver: Deliver) -> AsyncIterator[None]:
        """Encode in the background; on leaving, cancel what is left."""
        self._running = asyncio.create_task(self.run(deliver))
        try:
            yield
        finally:
            await self.end()

    async def end(self) -> None:
        """Stop encoding: the other leg has all that it needs, or nobody needs it any more."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def beside(self, leg: Awaitable[T]) -> T:
        """Await the other leg; an item that cannot be encoded ends it. Raises ``LegFailed``."""
        return await leg if self._running is None else await unless_fails(leg, self._running)
