"""Waiting for several things at once without losing an error or a task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_first_error(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines together and return their results in order; the first error cancels the others and is raised."""
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks.extend(group.create_task(coroutine) for coroutine in coroutines)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def unless_fails(work: Awaitable[T], other: asyncio.Future[Any]) -> T:
    """Await ``work``; if ``other`` fails before it is done, end it and raise that failure instead."""
    running = asyncio.ensure_future(work)
    try:
        waiting: set[asyncio.Future[Any]] = {running, other}
        while not running.done():
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            waiting -= done
            _raise_failure(other)
        _raise_failure(other)
        return running.result()
    finally:
        if not running.done():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        elif not running.cancelled():
            running.exception()  # seen, whatever was raised instead


def _raise_failure(future: asyncio.Future[Any]) -> None:
    if future.done() and not future.cancelled() and (error := future.exception()) is not None:
        raise error
