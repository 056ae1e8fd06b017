"""Every exception that the system raises on purpose, and nothing about how one is shown to a client.

EpdError
├── ConfigError                  the configuration cannot work; raised at start-up, names the YAML path
├── InvalidRequestError          the client's fault (400)
│   ├── MediaError               one media part cannot be used
│   ├── PromptTooLongError       prompt and output do not fit the model's context or the KV cache
│   └── UnsupportedModeError     the configured pools cannot form the requested mode
├── AuthenticationError          bad or missing API key (401)
├── ForbiddenError               open to this machine only, and called from elsewhere (403)
├── ModelNotFoundError           no such model (404)
├── BodyTooLargeError            request body over the limit (413)
├── AdmissionRejectedError       the SLO cannot be met now, or the queues are full (429)
├── MediaFetchError              a media URL failed for now (502)
├── StageFailedError             a stage failed and no other replica could take it (503)
├── DeadlineExceededError        the request's deadline passed (504)
├── RequestReturnedError         a decode replica gives a request back to be prefilled elsewhere
└── TransferError                moving an embedding or KV cache failed
    ├── HandleExpiredError       the owner no longer holds the memory behind a handle
    ├── IncompatiblePeerError    owner and fetcher disagree on model, dtype or layout
    └── PeerLostError            the owner cannot be reached
        └── PeerGoneError        the owner has ended, so that it cannot write anything any more

All of them survive pickling (every argument goes to ``super().__init__``), so that they cross process boundaries with
their attributes intact. Messages are in the user's terms.
"""

from __future__ import annotations


class EpdError(Exception):
    """Base of all deliberate errors. ``str(error)`` is a sentence that a client may read."""

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class ConfigError(EpdError):
    """The configuration cannot work. ``path`` is the YAML path, e.g. ``args.pools.decode.roles``."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(path, message)
        self.path = path

    @property
    def message(self) -> str:
        return f"{self.path}: {self.args[1]}"

    def __str__(self) -> str:
        return self.message


class InvalidRequestError(EpdError):
    """The request is at fault. ``param`` names the part of the body, e.g. ``messages[0].content[1]``."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.param = param

    def __str__(self) -> str:
        return self.message


class MediaError(InvalidRequestError):
    """One media part cannot be used: undecodable, unsupported, over a limit, or refused by the URL policy."""


class PromptTooLongError(InvalidRequestError):
    """The prompt, with the output it asks for, does not fit the context length or the KV cache."""


class UnsupportedModeError(InvalidRequestError):
    """The configured pools cannot form the requested mode."""


class AuthenticationError(EpdError):
    """The API key is missing or unknown."""


class ForbiddenError(EpdError):
    """The server is open to its own machine only, and the request came another way."""


class ModelNotFoundError(EpdError):
    """The named model is not served here."""


class BodyTooLargeError(EpdError):
    """The request body is over the configured limit."""


class AdmissionRejectedError(EpdError):
    """The request was not admitted. ``reason`` is a short metric label, e.g. ``ttft`` or ``queue_full``."""

    def __init__(self, message: str, reason: str, retry_after_s: float) -> None:
        super().__init__(message, reason, retry_after_s)
        self.reason = reason
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class MediaFetchError(EpdError):
    """A media URL failed in a way that may pass: DNS, time-out, 5xx. ``param`` names the part of the body."""

    def __init__(self, message: str, param: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, param, retry_after_s)
        self.param = param
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class StageFailedError(EpdError):
    """A stage failed and no other replica could take it."""

    def __init__(self, stage: str, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(stage, message, retry_after_s)
        self.stage = stage
        self.retry_after_s = retry_after_s

    @property
    def message(self) -> str:
        return f"{self.stage} failed: {self.args[1]}"

    def __str__(self) -> str:
        return self.message


class DeadlineExceededError(EpdError):
    """The request's deadline passed before it finished."""


class RequestReturnedError(EpdError):
    """A decode replica cannot go on with a request and gives it back.

    The tokens that it already streamed stand; whoever placed the request prefills prompt plus output somewhere else.
    """

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(request_id, reason)
        self.request_id = request_id
        self.reason = reason

    @property
    def message(self) -> str:
        return f"request {self.request_id} was given back: {self.reason}"

    def __str__(self) -> str:
        return self.message


class TransferError(EpdError):
    """Moving an embedding or KV blocks between two replicas failed."""


class HandleExpiredError(TransferError):
    """The owner no longer holds the memory behind a handle: released, or its lease ran out."""


class IncompatiblePeerError(TransferError):
    """Two replicas disagree on model, revision, dtype, block size or layout, so their memory cannot be exchanged."""


class PeerLostError(TransferError):
    """The owner of a handle cannot be reached."""


class PeerGoneError(PeerLostError):
    """The other replica has ended: nothing of it can read or write any more."""
