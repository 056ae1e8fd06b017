"""Routes a call to exactly the replica that it names, which Serve has no option for.

A caller says ``handle.options(session_id=<unique id of the replica>)``. Knows nothing of requests, stages or placement,
and imports little: every process that calls a pool loads this module.

Serve's stock routing loop is passed by on purpose. It indexes pending requests by the *parent's* request id, so two
calls made at the same time on behalf of one request (two encoders for its two images) overwrite each other's entry and
wait for ever; and it starts at most two routing tasks per replica. Here a call looks its replica up and leaves. The one
private method that this replaces is guarded by ``tests/local/test_pinned_router.py``, which fails when Ray changes.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.common import ReplicaID
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from ray.serve.request_router import RequestRouter

ROUTER_PATH = f"{__name__}.PinnedRequestRouter"
REFUSAL_WINDOW_S = 2.0
"""For how long a call is offered again to a replica that refuses it: at its limit, or unreachable for a moment."""

MAX_DEPARTED = 64


class PinnedRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray is not typed here
    """Sends a call to the replica named by ``session_id``; a call that names none goes to the first replica.

    A target that is gone raises ``ReplicaUnavailableError`` at once; one that keeps refusing raises
    ``BackPressureError`` after ``REFUSAL_WINDOW_S``. Choosing another replica is the caller's business.

    A replica that Serve is draining is no longer among its running ones, but still owns memory that others renew, read
    and release. So those that left are remembered for calls that name them, until they refuse or are dead.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._departed: dict[str, RunningReplica] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        running = {replica.replica_id for replica in replicas}
        for replica_id, replica in self.curr_replicas.items():
            if replica_id not in running:
                self._departed[replica_id.unique_id] = replica
        for unique_id in list(self._departed)[:-MAX_DEPARTED]:
            del self._departed[unique_id]
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        self._departed.pop(replica_id.unique_id, None)
        super().on_replica_actor_died(replica_id)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        if is_retry:
            await self._back_off(pending_request)
        replica = self._target(pending_request)
        if replica is None:
            raise ReplicaUnavailableError(pending_request.metadata.session_id)
        return replica

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Answer Serve's own selection (``handle.choose_replica``) by the same rule."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        replica = self._target(pending_request)
        return [[replica]] if replica is not None else [[]]

    def _target(self, pending_request: PendingRequest) -> RunningReplica | None:
        unique_id = pending_request.metadata.session_id
        replicas = self.curr_replicas.values()
        if not unique_id:
            return next(iter(replicas), None)
        running = next((replica for replica in replicas if replica.replica_id.unique_id == unique_id), None)
        return running if running is not None else self._departed.get(unique_id)

    async def _back_off(self, pending_request: PendingRequest) -> None:
        """Wait for as long as the call has waited already, so that the pauses double; notice a replica that died."""
        self._departed.pop(pending_request.metadata.session_id, None)
        waited_s = time.time() - pending_request.created_at
        if waited_s > REFUSAL_WINDOW_S:
            raise BackPressureError(1, 0)
        await asyncio.sleep(max(waited_s, self.initial_backoff_s))
        replica = self._target(pending_request)
        if replica is None:
            return
        try:
            async with asyncio.timeout(REFUSAL_WINDOW_S):
                await replica.get_queue_len(deadline_s=REFUSAL_WINDOW_S)
        except ActorDiedError:
            self.on_replica_actor_died(replica.replica_id)
        except (ActorUnavailableError, TimeoutError):
            self.on_replica_actor_unavailable(replica.replica_id)
