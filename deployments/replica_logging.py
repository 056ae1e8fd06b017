"""Keeps a replica's log readable: an error that was raised on purpose is a line there, not a page; and complete: what
the core reports of its start stands there beside Serve's own lines.

Knows Ray's and Serve's habits of logging, and nothing of what is served.
"""

from __future__ import annotations

import logging
import warnings

from epd.errors import EpdError


class _DeliberateErrors(logging.Filter):
    """Replaces the traceback that Serve logs for each failed call by the message, if the failure was deliberate."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, EpdError):
            record.exc_info = None
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.msg, record.args = "call refused: %s: %s", (type(error).__name__, error.message)
        return True


def quieten_replica_log() -> None:
    """Call once in each replica's process."""
    serve_log = logging.getLogger("ray.serve")
    serve_log.addFilter(_DeliberateErrors())
    core_log = logging.getLogger("epd")
    core_log.setLevel(logging.INFO)
    for handler in serve_log.handlers:
        if handler not in core_log.handlers:
            core_log.addHandler(handler)
    # Ray warns once per process that tensors from the object store are shared and read-only: the connectors' contract.
    warnings.filterwarnings("ignore", message="Zero-copy tensor serialization is enabled")
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
