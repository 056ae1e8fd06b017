"""Work that threads do in steps for the event loop.

If these fail, blocks of a cancelled request are reused while its transfer still writes to them, or the server stalls
for all its users while one transfer is made.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from epd.errors import TransferError
from epd.transfer.steps import Steps, StepThreads, is_on_event_loop


@pytest.fixture
def threads() -> Iterator[StepThreads]:
    threads = StepThreads(1, "test-steps")
    yield threads
    threads.close()


def count_to(end: int, seen: list[bool], pause_s: float = 0.0) -> Steps[int]:
    for _ in range(end):
        seen.append(is_on_event_loop())
        yield pause_s
    return end


@pytest.mark.parametrize("pause_s", [0.0, 1e-4])
async def test_steps_run_in_a_thread_to_their_end_and_their_result_is_returned(
    threads: StepThreads, pause_s: float
) -> None:
    seen: list[bool] = []
    assert await threads.run(count_to(3, seen, pause_s)) == 3
    assert seen == [False, False, False]
    assert not threads.has_queue


async def test_only_the_first_step_is_taken_inline(threads: StepThreads) -> None:
    seen: list[bool] = []
    assert await threads.run(count_to(3, seen), is_inline=True) == 3
    assert seen == [True, False, False]
    assert await threads.run(count_to(0, seen), is_inline=True) == 0


@pytest.mark.parametrize("is_inline", [False, True])
async def test_an_error_is_raised_where_it_is_awaited(threads: StepThreads, is_inline: bool) -> None:
    def fail() -> Steps[None]:
        yield from ()
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        await threads.run(fail(), is_inline=is_inline)


async def test_a_cancelled_waiter_unwinds_only_after_the_last_step(threads: StepThreads) -> None:
    started, may_go_on, told, ended = threading.Event(), threading.Event(), [], []

    def work() -> Steps[None]:
        started.set()
        may_go_on.wait(60)
        yield 0.0
        yield 1e-4
        ended.append(1)

    waiting = asyncio.create_task(threads.run(work(), on_cancel=lambda: told.append(1)))
    await asyncio.to_thread(started.wait, 60)
    for num_cancellations in (1, 2):
        waiting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        assert len(told) == num_cancellations
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == [1]


async def test_a_cancellation_outranks_an_error(threads: StepThreads) -> None:
    started, may_fail = threading.Event(), threading.Event()

    def fail() -> Steps[None]:
        started.set()
        may_fail.wait(60)
        raise ValueError("nobody waits for this")
        yield 0.0

    waiting = asyncio.create_task(threads.run(fail(), on_cancel=may_fail.set))
    await asyncio.to_thread(started.wait, 60)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_work_that_waits_for_a_thread_is_seen(threads: StepThreads) -> None:
    started, may_end = threading.Event(), threading.Event()

    def hold() -> Steps[None]:
        started.set()
        may_end.wait(60)
        yield from ()

    holding = asyncio.create_task(threads.run(hold()))
    await asyncio.to_thread(started.wait, 60)
    assert not threads.has_queue
    waiting = asyncio.create_task(threads.run(count_to(0, [])))
    await asyncio.sleep(0)
    assert threads.has_queue
    may_end.set()
    await asyncio.gather(holding, waiting)
    assert not threads.has_queue


async def test_closed_threads_take_no_more_steps(threads: StepThreads) -> None:
    threads.close()
    for pause_s in (0.0, 1e-4):
        with pytest.raises(TransferError, match="shutting down"):
            await threads.run(count_to(2, [], pause_s), is_inline=True)
    with pytest.raises(TransferError, match="shutting down"):
        await threads.run(count_to(2, []))
