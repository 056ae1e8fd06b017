"""Replicas are made known to one another. If these fail, the first request of every pair of replicas waits for a
connection, or an ingress stops introducing because one replica did not answer."""

from __future__ import annotations

import asyncio

from deployments.introductions import Introductions
from epd.types import ReplicaLoad, Stage

E, P, D = Stage.ENCODE, Stage.PREFILL, Stage.DECODE


class Replicas:
    """Replicas that note whom they met."""

    def __init__(self) -> None:
        self.met: list[tuple[str, str]] = []
        self.dead: set[str] = set()

    async def ask(self, replica_id: str, method: str, *args: bytes) -> bytes | None:
        await asyncio.sleep(0)
        if replica_id in self.dead:
            raise TimeoutError
        if method == "introduction":
            return replica_id.encode()
        self.met.append((replica_id, args[0].decode()))
        return None


def load(replica_id: str, *roles: Stage) -> ReplicaLoad:
    return ReplicaLoad(replica_id, "pool", frozenset(roles))


async def settle(introductions: Introductions) -> None:
    while introductions._under_way:
        await asyncio.gather(*introductions._under_way)


async def test_those_that_prefill_and_those_that_decode_meet_both_ways():
    replicas = Replicas()
    introductions = Introductions(replicas.ask)
    introductions.notice([load("e", E), load("p1", E, P), load("p2", P), load("d", D)])
    await settle(introductions)
    assert sorted(replicas.met) == [("d", "p1"), ("d", "p2"), ("p1", "d"), ("p2", "d")]


async def test_only_what_is_new_is_introduced():
    replicas = Replicas()
    introductions = Introductions(replicas.ask)
    old = [load("p", P), load("d1", D)]
    introductions.notice(old)
    await settle(introductions)
    replicas.met.clear()
    introductions.notice(old)
    introductions.notice([*old, load("d2", D)])
    await settle(introductions)
    assert sorted(replicas.met) == [("d2", "p"), ("p", "d2")]


async def test_a_replica_that_comes_back_is_introduced_again():
    replicas = Replicas()
    introductions = Introductions(replicas.ask)
    for loads in ([load("p", P), load("d", D)], [load("p", P)], [load("p", P), load("d", D)]):
        replicas.met.clear()
        introductions.notice(loads)
        await settle(introductions)
    assert sorted(replicas.met) == [("d", "p"), ("p", "d")]


async def test_one_that_does_not_answer_keeps_nobody_else_from_meeting():
    replicas = Replicas()
    replicas.dead = {"p1"}
    introductions = Introductions(replicas.ask)
    introductions.notice([load("p1", P), load("p2", P), load("d", D)])
    await settle(introductions)
    assert sorted(replicas.met) == [("d", "p2"), ("p2", "d")]


async def test_closing_ends_what_is_under_way():
    async def never(*args: object) -> None:
        await asyncio.Event().wait()

    introductions = Introductions(never)
    introductions.notice([load("p", P), load("d", D)])
    await asyncio.sleep(0)
    await introductions.close()
    assert not introductions._under_way
