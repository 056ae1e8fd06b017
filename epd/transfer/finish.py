"""Waiting for work that must not be abandoned half-way, whoever cancels the waiter. Knows nothing of transfers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

__all__ = ["finish"]

T = TypeVar("T")


async def finish(work: Awaitable[T], on_cancel: Callable[[], None] | None = None) -> T:
    """Await ``work`` to its end. A cancellation is told to ``on_cancel`` at once, but takes effect only after the end.

    Whoever is cancelled here may thus reuse, once unwound, the memory that the work was writing to.
    """
    future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
            if on_cancel is not None:
                on_cancel()
    if cancelled is None:
        return future.result()
    if not future.cancelled():
        future.exception()  # Seen; the cancellation outranks it.
    raise cancelled
