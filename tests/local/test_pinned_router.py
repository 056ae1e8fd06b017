"""Calls reach exactly the replica that they name. If these fail after an upgrade of Ray, ``deployments.pinned``
replaces a private method that changed: placements would be ignored, or calls would wait for ever.
"""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.router import AsyncioRouter
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from ray.serve.request_router import RequestRouter

import deployments.pinned
from deployments.pinned import ROUTER_PATH, PinnedRequestRouter


@dataclass
class FakeReplica:
    """As much of Serve's ``RunningReplica`` as routing touches."""

    unique_id: str
    error: Exception | None = None
    num_probes: int = 0
    replica_id: Any = field(init=False)

    def __post_init__(self) -> None:
        self.replica_id = SimpleNamespace(unique_id=self.unique_id)

    def __hash__(self) -> int:
        return hash(self.unique_id)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.num_probes += 1
        if self.error is not None:
            raise self.error
        return 0


class Router(PinnedRequestRouter):
    """The router over fake replicas, without the parts of its base class that talk to Serve."""

    def __init__(self, *replicas: FakeReplica) -> None:
        self.initial_backoff_s = 0.001
        self._replicas = {replica.unique_id: replica for replica in replicas}
        self._departed = {}
        self.unavailable: list[str] = []

    @property
    def curr_replicas(self) -> dict[str, FakeReplica]:
        return self._replicas

    def on_replica_actor_died(self, replica_id: Any) -> None:
        self._replicas.pop(replica_id.unique_id, None)

    def on_replica_actor_unavailable(self, replica_id: Any) -> None:
        self.unavailable.append(replica_id.unique_id)


def pending(unique_id: str, created_at: float | None = None) -> PendingRequest:
    metadata = SimpleNamespace(session_id=unique_id, internal_request_id="the parent's, shared")
    request = PendingRequest(args=[], kwargs={}, metadata=metadata)
    if created_at is not None:
        request.created_at = created_at
    return request


def test_ray_still_has_what_the_router_replaces_and_uses():
    theirs = inspect.signature(RequestRouter._choose_replica_for_request)
    ours = inspect.signature(PinnedRequestRouter._choose_replica_for_request)
    assert list(theirs.parameters) == list(ours.parameters)
    assert theirs.parameters["is_retry"].kind is ours.parameters["is_retry"].kind
    assert inspect.iscoroutinefunction(RequestRouter._choose_replica_for_request)
    sending = inspect.getsource(AsyncioRouter._route_and_send_request_once)
    assert "_choose_replica_for_request(" in sending
    for name in (
        "curr_replicas",
        "on_replica_actor_died",
        "on_replica_actor_unavailable",
        "choose_replicas",
        "update_replicas",
    ):
        assert hasattr(RequestRouter, name)
    assert ROUTER_PATH == "deployments.pinned.PinnedRequestRouter"


async def test_concurrent_calls_of_one_parent_reach_the_replicas_that_they_name():
    router = Router(*(FakeReplica(name) for name in "abc"))
    names = list("abcabcabc")
    chosen = await asyncio.gather(*(router._choose_replica_for_request(pending(name)) for name in names))
    assert [replica.unique_id for replica in chosen] == names


async def test_a_call_that_names_none_goes_to_some_replica():
    assert (await Router(FakeReplica("a"))._choose_replica_for_request(pending(""))).unique_id == "a"


async def test_a_replica_that_is_gone_is_an_error_at_once():
    with pytest.raises(ReplicaUnavailableError):
        await Router(FakeReplica("a"))._choose_replica_for_request(pending("b"))


async def test_a_refused_call_is_offered_again_to_the_same_replica():
    replica = FakeReplica("a")
    again = await Router(replica, FakeReplica("b"))._choose_replica_for_request(pending("a"), is_retry=True)
    assert again is replica
    assert replica.num_probes == 1


async def test_a_replica_that_keeps_refusing_is_given_up():
    old = pending("a", created_at=0.0)
    with pytest.raises(BackPressureError):
        await Router(FakeReplica("a"))._choose_replica_for_request(old, is_retry=True)


async def test_a_replica_found_dead_on_a_retry_is_dropped():
    router = Router(FakeReplica("a", ActorDiedError()), FakeReplica("b"))
    with pytest.raises(ReplicaUnavailableError):
        await router._choose_replica_for_request(pending("a"), is_retry=True)
    assert list(router.curr_replicas) == ["b"]


async def test_a_replica_that_is_drained_is_reached_until_it_refuses():
    leaving = FakeReplica("a")
    router = Router()
    router._departed = {"a": leaving}
    assert await router._choose_replica_for_request(pending("a")) is leaving
    with pytest.raises(ReplicaUnavailableError):
        await router._choose_replica_for_request(pending("a"), is_retry=True)
    with pytest.raises(ReplicaUnavailableError):
        await router._choose_replica_for_request(pending("a"))


def test_the_module_imports_little():
    """Every process that calls a pool loads it, the HTTP proxy included."""
    source = inspect.getsource(deployments.pinned)
    imported = [line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert all(name.split(".")[0] in ("__future__", "asyncio", "time", "typing", "ray") for name in imported)
