"""Server-sent events. Knows nothing of what they carry."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

DONE = b"data: [DONE]\n\n"

# Kept, since ``json.dumps`` with arguments of its own builds an encoder at each call.
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(data: Mapping[str, Any]) -> bytes:
    """Return one event; JSON has no raw newline, so it is one line."""
    return f"data: {to_json(data)}\n\n".encode()


class EventStream(StreamingResponse):
    """A response whose source is closed however the response ends.

    Starlette leaves a generator that a disconnect interrupted to the garbage collector; here an open one holds memory
    of replicas. ``on_end`` is called last, also if not even the first event was asked for.
    """

    def __init__(
        self, events: AsyncGenerator[bytes], headers: Mapping[str, str], *, on_end: Callable[[], Awaitable[None]]
    ) -> None:
        no_buffering = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers={**no_buffering, **headers}, media_type="text/event-stream")
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_or_disconnect() -> Message:
            try:
                return await receive()
            except Exception:  # Serve cancels the task behind it when the client has gone
                return {"type": "http.disconnect"}

        try:
            await super().__call__(scope, receive_or_disconnect, send)
        finally:
            await self._events.aclose()
            await self._on_end()
