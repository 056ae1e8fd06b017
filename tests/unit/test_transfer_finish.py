"""Waiting through a cancellation.

If these fail, blocks of a cancelled request are reused while its transfer still writes to them.
"""

from __future__ import annotations

import asyncio

import pytest

from epd.transfer.finish import finish


async def test_a_cancelled_waiter_unwinds_only_when_the_work_has_ended() -> None:
    may_end, told = asyncio.Event(), []
    waiting = asyncio.create_task(finish(may_end.wait(), on_cancel=lambda: told.append(1)))
    for num_cancellations in (1, 2):
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
        assert len(told) == num_cancellations
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_results_and_errors_pass_through() -> None:
    async def answer(value: int) -> int:
        if value == 0:
            raise ValueError("zero")
        return value

    assert await finish(answer(3)) == 3
    with pytest.raises(ValueError, match="zero"):
        await finish(answer(0))


async def test_an_error_of_abandoned_work_is_not_reported_as_lost() -> None:
    may_end = asyncio.Event()

    async def fail() -> None:
        await may_end.wait()
        raise ValueError("nobody waits for this")

    waiting = asyncio.create_task(finish(fail()))
    await asyncio.sleep(0)
    waiting.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_timeout_around_it_still_times_out() -> None:
    may_end = asyncio.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await finish(may_end.wait(), on_cancel=may_end.set)
