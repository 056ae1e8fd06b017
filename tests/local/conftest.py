"""Imports Ray Serve before the tests do, whose warnings are errors: its own use of pydantic is not theirs to fix."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve
    import ray.serve.request_router  # noqa: F401
