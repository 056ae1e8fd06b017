"""Streams whose client goes away. If these fail, a replica keeps its blocks, or a request counts as running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from deployments.streaming import EventStream, event


class Source:
    """Endless events; notes whether it was closed, and in what order the response was taken down."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    async def events(self) -> AsyncGenerator[bytes]:
        try:
            while True:
                yield event({"a": 1})
                await asyncio.sleep(0)
        finally:
            self.steps.append("source closed")

    async def on_end(self) -> None:
        self.steps.append("ended")


async def answered(
    source: Source, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
) -> None:
    response = EventStream(source.events(), {"x-epd-mode": "epd"}, on_end=source.on_end)
    await response({"type": "http", "asgi": {"spec_version": "2.0"}}, receive, send)


def test_an_event_is_one_line_whatever_the_text():
    assert event({"text": "a\nb\u00e9"}) == 'data: {"text":"a\\nb\u00e9"}\n\n'.encode()


@pytest.mark.parametrize("how", ["message", "error"])
async def test_a_client_that_leaves_closes_the_source_and_then_ends_the_request(how: str):
    source, sent = Source(), []
    has_sent = asyncio.Event()

    async def receive() -> Any:
        await has_sent.wait()
        if how == "error":
            raise RuntimeError("Serve cancels what waits for the next message")
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 3:
            has_sent.set()

    await answered(source, receive, send)
    assert source.steps == ["source closed", "ended"]
    headers = dict(sent[0]["headers"])
    assert headers[b"x-epd-mode"] == b"epd"
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-cache"


async def test_a_client_that_leaves_before_the_first_event_ends_the_request_too():
    source = Source()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        raise OSError("the connection is closed")

    with pytest.raises(OSError, match="closed"):
        await answered(source, receive, send)
    assert source.steps == ["ended"]
