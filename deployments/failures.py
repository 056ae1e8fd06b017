"""Turns what Ray raises when a call fails into the exceptions of ``epd.errors``. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import grpc  # type: ignore[import-untyped]
from ray.exceptions import ObjectLostError, RayActorError, RayError, RaySystemError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.exceptions import ReplicaUnavailableError as ReplicaGoneError

from epd.errors import EpdError

_GONE = (RayActorError, ObjectLostError, RaySystemError, TaskCancelledError, RequestCancelledError)
_UNAVAILABLE_STATUS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@contextlib.contextmanager
def translated(lost: Callable[[str], EpdError]) -> Iterator[None]:
    """Run a remote call; re-raise deliberate errors unwrapped, and loss of the replica as ``lost(reason)``.

    A bug in the callee (any exception that is no ``EpdError``) comes out as the exception that the callee raised.
    """
    try:
        yield
    except EpdError as error:
        raise _unwrapped(error) from None
    except asyncio.CancelledError:
        if _is_cancelling():
            raise
        # Nobody cancelled *us*: the callee was shut down and its cancellation came back as ours.
        raise lost("it was stopped") from None
    except RayTaskError as error:
        if isinstance(error.cause, _GONE):
            raise lost("a replica that it depends on died") from error
        raise
    except BackPressureError as error:
        raise lost("it is at its limit of concurrent calls") from error
    except (ReplicaGoneError, DeploymentUnavailableError) as error:
        raise lost("it is gone") from error
    except _GONE as error:
        raise lost("it died or cannot be reached") from error
    except grpc.aio.AioRpcError as error:
        if error.code() in _UNAVAILABLE_STATUS:
            raise lost("it cannot be reached") from error
        raise
    except TimeoutError as error:
        raise lost("it does not answer") from error
    except RayError as error:
        raise lost(type(error).__name__) from error


def _unwrapped(error: EpdError) -> EpdError:
    """Return the original of the double-typed exception (``RayTaskError`` and its cause) that Ray raises."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(error, RayTaskError) and isinstance(cause, EpdError) else error


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
