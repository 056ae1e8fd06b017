"""An open-loop load client for any OpenAI-compatible server: sends when due, logs when tokens arrive, never raises.

Owns HTTP, SSE parsing and pacing. Knows nothing of workload shapes (it sends prepared bodies) or of objectives. One
event loop carries all requests; bodies are built beforehand, since drawing images while tokens arrive would show.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from epd.bench.metrics import RequestTimeline


@dataclass(frozen=True, slots=True)
class Contender:
    """A server, or one mode of a server, under test. ``mode`` is sent as ``epd.mode``; ``None`` sends no ``epd``."""

    name: str
    base_url: str
    model: str
    mode: str | None = None
    api_key: str | None = None
    wants_trace: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """What to add to a body so that it runs in this contender's mode."""
        if self.mode is None:
            return {}
        return {"epd": {"mode": self.mode, "trace": self.wants_trace}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        return headers


@dataclass(frozen=True, slots=True)
class Due:
    """A prepared request: its body and when to send it, in seconds after the start."""

    index: int
    due_s: float
    body: bytes


def api_root(base_url: str) -> str:
    """Return the URL that ends in ``/v1``, whether or not the given one does."""
    url = base_url.rstrip("/")
    return url if url.endswith("/v1") else url + "/v1"


async def run_open_loop(
    client: httpx.AsyncClient,
    contender: Contender,
    requests: Sequence[Due],
    *,
    on_done: Callable[[RequestTimeline], None] = lambda timeline: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[RequestTimeline]:
    """Send every request when it is due, however many are still running, and return their logs in the given order.

    Cancelling this call closes all connections, so the server sees every client go.
    """
    start_s = clock()

    async def one(request: Due) -> RequestTimeline:
        due_at_s = start_s + request.due_s
        delay_s = due_at_s - clock()
        if delay_s > 0:
            await sleep(delay_s)
        timeline = await send(client, contender, request, due_at_s=due_at_s, clock=clock)
        on_done(timeline)
        return timeline

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(request)) for request in requests]
    return [task.result() for task in tasks]


@dataclass(slots=True)
class _Log:
    token_at_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    mode: str = ""
    error: str = ""
    trace: Mapping[str, Any] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)
    is_done: bool = False

    def read(self, data: str, now_s: float) -> None:
        """Take in one SSE data payload that arrived at ``now_s``."""
        if data == "[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        if event.get("error"):
            self.error = _error_message(event["error"])
        usage = event.get("usage") or {}
        self.num_prompt_tokens = usage.get("prompt_tokens") or self.num_prompt_tokens
        self.num_output_tokens = usage.get("completion_tokens") or self.num_output_tokens
        if isinstance(event.get("epd"), dict):
            self.trace = event["epd"]
            self.mode = self.trace.get("mode") or self.mode
        choices = event.get("choices") or [{}]
        delta = choices[0].get("delta") or {}
        piece = delta.get("content") or delta.get("reasoning_content")
        if piece:
            self.token_at_s.append(now_s)
            self.text.append(piece)
        # Some servers close the stream here, without the "[DONE]" that OpenAI's API sends.
        self.is_done = self.is_done or choices[0].get("finish_reason") is not None


async def send(
    client: httpx.AsyncClient,
    contender: Contender,
    request: Due,
    *,
    due_at_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> RequestTimeline:
    """Send one streaming request and log it. A failure of any kind is in the log's ``error``, never raised."""
    log, status = _Log(), 0
    sent_at_s = clock()
    try:
        url = api_root(contender.base_url) + "/chat/completions"
        async with client.stream("POST", url, content=request.body, headers=contender.headers) as response:
            status = response.status_code
            log.mode = response.headers.get("x-epd-mode", "")
            if status != 200:
                log.error = f"HTTP {status}: {_error_message(await response.aread())}"
            else:
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        log.read(line[5:].strip(), clock())
                if not log.error and not log.is_done:
                    log.error = "the stream ended before its last token"
                elif not log.error and not log.token_at_s:
                    log.error = "no text"
    except (httpx.HTTPError, ValueError, AttributeError) as error:
        log.error = f"{type(error).__name__}: {error}"
    return RequestTimeline(
        index=request.index,
        contender=contender.name,
        due_at_s=sent_at_s if due_at_s is None else due_at_s,
        sent_at_s=sent_at_s,
        ended_at_s=clock(),
        token_at_s=tuple(log.token_at_s),
        num_prompt_tokens=log.num_prompt_tokens,
        num_output_tokens=log.num_output_tokens,
        status=status,
        error=log.error,
        mode=log.mode,
        trace=log.trace,
        text="".join(log.text),
    )


async def first_model(client: httpx.AsyncClient, base_url: str, api_key: str | None = None) -> dict[str, Any]:
    """Return the first entry of ``/v1/models``. Raises ``httpx.HTTPError`` if there is no usable answer."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    response = await client.get(api_root(base_url) + "/models", headers=headers)
    response.raise_for_status()
    try:
        entry: dict[str, Any] = response.json()["data"][0]
    except (ValueError, LookupError, TypeError) as error:
        raise httpx.DecodingError(f"{base_url} does not list a model: {error!r}") from error
    return entry


def _error_message(error: object) -> str:
    if isinstance(error, bytes):
        try:
            parsed = json.loads(error)
        except ValueError:
            return error.decode(errors="replace")[:300]
        error = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error)[:300]
