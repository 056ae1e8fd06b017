"""How an exception looks to an HTTP client: status, headers, and the OpenAI error object.

Messages come from the attributes of deliberate errors, never from a remote traceback. Knows nothing of FastAPI or Ray.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from epd import errors


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error reply. ``code`` is the machine-readable reason inside the OpenAI error object."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


_INVALID = "invalid_request_error"
_SERVER = "server_error"

_TABLE: tuple[tuple[type[errors.EpdError], int, str, str | None], ...] = (
    # Subclasses first.
    (errors.PromptTooLongError, 400, _INVALID, "context_length_exceeded"),
    (errors.UnsupportedModeError, 400, _INVALID, "unsupported_mode"),
    (errors.MediaError, 400, _INVALID, "invalid_media"),
    (errors.InvalidRequestError, 400, _INVALID, None),
    (errors.AuthenticationError, 401, _INVALID, "invalid_api_key"),
    (errors.ForbiddenError, 403, _INVALID, "forbidden"),
    (errors.ModelNotFoundError, 404, _INVALID, "model_not_found"),
    (errors.BodyTooLargeError, 413, _INVALID, "request_too_large"),
    (errors.AdmissionRejectedError, 429, "rate_limit_error", None),
    (errors.MediaFetchError, 502, _SERVER, "media_fetch_failed"),
    (errors.DeadlineExceededError, 504, _SERVER, "deadline_exceeded"),
    (errors.StageFailedError, 503, _SERVER, "stage_failed"),
    (errors.TransferError, 503, _SERVER, "stage_failed"),
    (errors.RequestReturnedError, 503, _SERVER, "stage_failed"),
)

_RETRY_AFTER_S = 1.0


def to_http(error: BaseException, request_id: str) -> HttpError:
    """Return the reply for an exception; anything that is not deliberate is a bug, named by the request's id only."""
    for kind, status, type_, code in _TABLE:
        if isinstance(error, kind):
            retry_after_s = getattr(error, "retry_after_s", None)
            if status == 503 and retry_after_s is None:
                retry_after_s = _RETRY_AFTER_S
            code = getattr(error, "reason", None) if status == 429 else code
            param = getattr(error, "param", None)
            # Most clients show the message alone, so it names the part too.
            message = error.message if not param or param in error.message else f"{param}: {error.message}"
            return HttpError(status, message, type_, code, param, retry_after_s)
    return HttpError(500, f"internal error; the request's id is {request_id}", _SERVER, "internal_error")
