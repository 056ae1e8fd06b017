"""Embeddings that follow their prompt's call. If these fail, a prompt waits for ever for an image that has long been
encoded, or memory of encoders stays lent for nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from epd.stages.late_inputs import LateInputs
from epd.types import EmbeddingHandle

HANDLE = EmbeddingHandle("a", "e", "fake", 64, 30.0, "fake", b"", "hash", 4)
OTHER = replace(HANDLE, handle_id="b")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def given_up() -> list[EmbeddingHandle]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def late(given_up, clock) -> LateInputs:
    return LateInputs(given_up.append, keep_s=10.0, clock=clock)


async def test_an_input_reaches_a_leg_that_waits_for_it(late, given_up):
    with late.leg("leg", frozenset({0})) as leg:
        waiting = asyncio.create_task(leg.take(0))
        await asyncio.sleep(0)
        assert late.provide("leg", 0, HANDLE)
        assert await waiting == HANDLE
    assert given_up == []


async def test_an_input_may_come_before_its_leg(late, given_up):
    assert late.provide("leg", 0, HANDLE)
    assert late.num_early == 1
    with late.leg("leg", frozenset({0})) as leg:
        assert late.num_early == 0
        assert await leg.take(0) == HANDLE
    assert given_up == []


async def test_inputs_of_several_items_come_in_any_order(late):
    assert late.provide("leg", 1, OTHER)
    with late.leg("leg", frozenset({0, 1})) as leg:
        assert late.provide("leg", 0, HANDLE)
        assert [await leg.take(0), await leg.take(1)] == [HANDLE, OTHER]


async def test_what_a_leg_did_not_take_is_given_up_when_it_ends(late, given_up):
    with late.leg("leg", frozenset({0, 1})):
        assert late.provide("leg", 0, HANDLE)
    assert given_up == [HANDLE]


async def test_what_arrives_as_the_waiting_task_is_cancelled_is_given_up(late, given_up):
    with late.leg("leg", frozenset({0})) as leg:
        waiting = asyncio.create_task(leg.take(0))
        await asyncio.sleep(0)
        assert late.provide("leg", 0, HANDLE)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert given_up == [HANDLE]


async def test_a_leg_that_is_over_takes_nothing(late, given_up):
    with late.leg("leg", frozenset({0})):
        pass
    assert not late.provide("leg", 0, HANDLE)
    assert given_up == []


async def test_an_item_that_is_not_needed_any_more_is_refused(late, given_up):
    with late.leg("leg", frozenset({0})) as leg:
        leg.decline(0)
        assert not late.provide("leg", 0, HANDLE)
    assert given_up == []


async def test_an_item_that_came_before_it_was_declined_is_given_up(late, given_up):
    with late.leg("leg", frozenset({0})) as leg:
        assert late.provide("leg", 0, HANDLE)
        leg.decline(0)
        assert given_up == [HANDLE]


@pytest.mark.parametrize("is_early", [True, False])
async def test_a_second_handle_for_an_item_is_refused(late, is_early):
    if is_early:
        assert late.provide("leg", 0, HANDLE)
        assert not late.provide("leg", 0, OTHER)
    with late.leg("leg", frozenset({0})) as leg:
        if not is_early:
            assert late.provide("leg", 0, HANDLE)
        assert not late.provide("leg", 0, OTHER)
        assert await leg.take(0) == HANDLE


async def test_an_early_input_that_its_leg_does_not_await_is_given_up(late, given_up):
    assert late.provide("leg", 7, HANDLE)
    with late.leg("leg", frozenset({0})):
        pass
    assert given_up == [HANDLE]


async def test_inputs_whose_leg_never_comes_are_given_up_after_a_while(late, given_up, clock):
    assert late.provide("leg", 0, HANDLE)
    clock.now_s = 9.0
    assert late.provide("another", 0, OTHER)
    assert given_up == []
    clock.now_s = 11.0
    late.provide("third", 0, replace(HANDLE, handle_id="c"))
    assert given_up == [HANDLE]
    assert late.num_early == 2


async def test_inputs_without_a_leg_are_bounded_in_number(late, given_up):
    for number in range(3000):
        assert late.provide(f"leg {number}", 0, replace(HANDLE, handle_id=str(number)))
    assert late.num_early <= 1025
    assert len(given_up) == 3000 - late.num_early
