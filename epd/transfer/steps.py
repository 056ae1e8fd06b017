"""Work in steps, on behalf of the event loop: threads take the steps, the loop does the waiting between them.

A transfer between processes of one host is over within its first step, so what matters is how little a step costs: one
hand-over to a thread and one back, with no task and no chain of futures in between. Each turn of a loop that has just
slept is slow (caches are cold), so a third of the time of a small transfer was spent there. Knows nothing of transfers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from epd.errors import TransferError

__all__ = ["SHUTTING_DOWN", "StepThreads", "Steps", "is_on_event_loop"]

T = TypeVar("T")

Steps: TypeAlias = Generator[float, None, T]
"""Work that yields, where it has to wait, for how many seconds; it resumes in any thread."""

SHUTTING_DOWN = "this replica is shutting down and transfers nothing any more"


@dataclass(frozen=True, slots=True)
class _Returned(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


class StepThreads:
    """A few threads that take steps. ``run`` is for the event loop, the rest thread-safe."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._num_queued = 0

    @property
    def has_queue(self) -> bool:
        """Whether steps of others wait for a thread: a good moment to yield."""
        return self._num_queued > 0

    async def run(self, steps: Steps[T], *, is_inline: bool = False, on_cancel: Callable[[], None] = lambda: None) -> T:
        """Run steps to their end, the first one here and now if ``is_inline``.

        A cancellation is told to ``on_cancel`` at once, but takes effect only after the last step, as in ``finish``:
        whoever is cancelled may reuse, once unwound, the memory that the steps were working on.

        Raises ``TransferError`` once closed.
        """
        loop = asyncio.get_running_loop()
        outcome = _resume(steps) if is_inline else 0.0
        cancelled: asyncio.CancelledError | None = None
        while isinstance(outcome, float):
            step = _Step(steps, loop)
            if outcome > 0:
                loop.call_later(outcome, self._submit, step)
            else:
                self._submit(step)
            while step.outcome is None:
                try:
                    await step.wait()
                except asyncio.CancelledError as error:
                    cancelled = error
                    on_cancel()
            outcome = step.outcome
        if cancelled is not None:
            raise cancelled
        if isinstance(outcome, _Raised):
            raise outcome.error
        return outcome.value

    def close(self) -> None:
        """Take no more steps. Those under way go on to their end."""
        self._threads.shutdown(wait=False)

    def _submit(self, step: _Step[T]) -> None:
        with self._lock:
            self._num_queued += 1
        try:
            self._threads.submit(self._take, step)
        except RuntimeError:  # Shut down.
            step.deliver(_Raised(TransferError(SHUTTING_DOWN)))

    def _take(self, step: _Step[T]) -> None:
        with self._lock:
            self._num_queued -= 1
        step.loop.call_soon_threadsafe(step.deliver, _resume(step.steps))


class _Step(Generic[T]):
    """One step in a thread, and who waits for it."""

    def __init__(self, steps: Steps[T], loop: asyncio.AbstractEventLoop) -> None:
        self.steps = steps
        self.loop = loop
        self.outcome: float | _Returned[T] | _Raised | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        self._waiter = self.loop.create_future()
        await self._waiter

    def deliver(self, outcome: float | _Returned[T] | _Raised) -> None:
        self.outcome = outcome
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def is_on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _resume(steps: Steps[T]) -> float | _Returned[T] | _Raised:
    try:
        return next(steps)
    except StopIteration as end:
        return _Returned(end.value)
    except BaseException as error:  # Raised again where it is awaited.
        return _Raised(error)
