"""Waiting for several things at once without losing an error or a task."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
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
