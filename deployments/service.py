"""What the HTTP endpoints do, without the server: validate, prepare, run, and write the reply or the error.

How replicas are reached is injected, so all of this runs in one process too. Knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar
from uuid import uuid4

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from deployments.auth import ApiKeys
from deployments.errors import HttpError, to_http
from deployments.exchange import NOT_PLACED, Exchange, OpenClients, Wish
from deployments.generation import Delta, Prepared, Timeline
from deployments.metrics import IngressMetrics, RequestCount
from deployments.placing import Placer
from deployments.preparation import Preparer
from deployments.protocol import ChatBody, CompletionBody, GenerationBody, parse_body
from deployments.replies import ChatReply, CompletionReply, ReplyFormat, TokenBytes
from deployments.streaming import DONE, EventStream, event, to_json
from epd.config import AppConfig
from epd.errors import (
    AdmissionRejectedError,
    BodyTooLargeError,
    DeadlineExceededError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedModeError,
)
from epd.stages.life import LifeOptions
from epd.types import Mode

logger = logging.getLogger(__name__)

MODE_HEADER = "x-epd-mode"
REQUEST_ID_HEADER = "x-request-id"
CLIENT_CLOSED = 499
"""What a request counts as in the metrics when its client went away (nginx's number)."""

_MARK = uuid4().hex
"""Stands for a text while what is around it is written."""

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)

Body = TypeVar("Body", bound=GenerationBody)
Prepare = Callable[[Body, float], Awaitable[list[Prepared]]]
MakeReply = Callable[[str, TokenBytes], ReplyFormat]


@dataclass(frozen=True, slots=True)
class _Run:
    """An exchange on its way out: what runs, and how it is written and counted."""

    exchange: Exchange
    body: GenerationBody
    reply: ReplyFormat
    request_id: str
    count: RequestCount
    around_text: dict[int, tuple[str, str]] = field(default_factory=dict)
    """What stands before and after the text in a chunk that brings nothing else, by choice."""

    def event(self, deltas: Sequence[Delta]) -> bytes:
        """Write a chunk; the trace goes on the last one: this one, if no choice is open and no usage follows."""
        if len(deltas) == 1 and _is_text_only(deltas[0]):
            return self._text_event(deltas[0])
        chunk = self.reply.chunk(deltas)
        if self.body.epd.trace and not self.exchange.num_open and not self.body.includes_usage:
            chunk["epd"] = self.exchange.trace
        return event(chunk)

    def _text_event(self, delta: Delta) -> bytes:
        """Write the usual event; all but its text is written once."""
        around = self.around_text.get(delta.choice)
        if around is None:
            before, after = to_json(self.reply.chunk([replace(delta, text=_MARK)])).split(to_json(_MARK))
            around = self.around_text[delta.choice] = (before, after)
        return f"data: {around[0]}{to_json(delta.text)}{around[1]}\n\n".encode()

    def usage_event(self) -> bytes:
        chunk = self.reply.usage_chunk(self.exchange.usage)
        if self.body.epd.trace:
            chunk["epd"] = self.exchange.trace
        return event(chunk)


def _is_text_only(delta: Delta) -> bool:
    return bool(delta.text) and delta.finish_reason is None and not delta.logprobs


class OpenAIService:
    """The endpoints of one ingress replica."""

    def __init__(
        self,
        config: AppConfig,
        preparer: Preparer,
        placer: Placer,
        open_clients: OpenClients,
        metrics: IngressMetrics,
        keys: ApiKeys,
    ) -> None:
        self._config = config
        self._preparer = preparer
        self._placer = placer
        self._open_clients = open_clients
        self._metrics = metrics
        self._keys = keys
        transfer = config.transfer
        self._life_options = LifeOptions(config.router.max_attempts, transfer.overlap, transfer.kv_mode != "pull")
        self._started_s = int(time.time())

    async def models(self, http: HttpRequest) -> Response:
        """``GET /v1/models``."""
        try:
            self._keys.check(http.headers.get("authorization"), http.scope.get("server"))
        except Exception as error:
            return self._error_reply(error, _request_id(http))
        model = {
            "id": self._config.model.served_name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "ray-epd",
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def chat(self, http: HttpRequest) -> Response:
        """``POST /v1/chat/completions``."""

        async def prepare(body: ChatBody, deadline_s: float) -> list[Prepared]:
            return [await self._preparer.chat(body, deadline_s=deadline_s)]

        return await self._answer(http, ChatBody, prepare, ChatReply)

    async def completions(self, http: HttpRequest) -> Response:
        """``POST /v1/completions``."""

        async def prepare(body: CompletionBody, deadline_s: float) -> list[Prepared]:
            prompts = body.prompts
            return [await self._preparer.completion(body, prompt, deadline_s=deadline_s) for prompt in prompts]

        return await self._answer(http, CompletionBody, prepare, CompletionReply)

    # -- the life of an exchange ---------------------------------------------------------------------------------------

    async def _answer(
        self, http: HttpRequest, kind: type[Body], prepare: Prepare[Body], make_reply: MakeReply
    ) -> Response:
        timeline, request_id = Timeline(time.monotonic()), _request_id(http)
        count = self._metrics.request_started()
        mode = NOT_PLACED
        try:
            self._keys.check(http.headers.get("authorization"), http.scope.get("server"))
            body = parse_body(kind, await read_body(http, self._config.ingress.max_body_bytes))
            self._check_model(body)
            wish = self._wish(http, body)
            prepared = await self._within_deadline(prepare, body)
            exchange = Exchange(prepared, wish, timeline, self._placer, self._metrics, self._life_options)
            reply = make_reply(body.model or self._config.model.served_name, self._preparer.token_bytes)
            run = _Run(exchange, body, reply, request_id, count)
            try:
                return await (self._streamed(run) if body.stream else self._whole(run))
            finally:
                mode = exchange.mode
        except ClientDisconnect:
            count.end(mode, CLIENT_CLOSED)
            return Response(status_code=CLIENT_CLOSED)
        except Exception as error:
            self._count_failure(count, mode, error)
            return self._error_reply(error, request_id)
        except BaseException:
            count.end(mode, CLIENT_CLOSED)
            raise

    async def _within_deadline(self, prepare: Prepare[Body], body: Body) -> list[Prepared]:
        allowed_s = self._config.router.deadline_s
        try:
            async with asyncio.timeout(allowed_s):
                return await prepare(body, time.time() + allowed_s)
        except TimeoutError:
            raise DeadlineExceededError("the request's deadline passed while its media were fetched") from None

    async def _whole(self, run: _Run) -> Response:
        gained: list[Delta] = []
        exchange = run.exchange
        async with contextlib.aclosing(exchange.deltas(self._open_clients)) as stream:
            async for deltas in stream:
                gained += deltas
        content = run.reply.whole(gained, exchange.num_choices, exchange.usage)
        if run.body.epd.trace:
            content["epd"] = exchange.trace
        run.count.end(exchange.mode, 200)
        return JSONResponse(content, headers={MODE_HEADER: exchange.mode})

    async def _streamed(self, run: _Run) -> Response:
        """Wait for the first tokens, so that whatever fails before them is a plain error reply."""
        stream = run.exchange.deltas(self._open_clients)
        try:
            first = await anext(stream)
        except BaseException:
            await stream.aclose()
            raise

        async def end() -> None:
            await stream.aclose()
            run.count.end(run.exchange.mode, CLIENT_CLOSED)

        headers = {MODE_HEADER: run.exchange.mode}
        return EventStream(self._events(run, first, stream), headers, on_end=end)

    async def _events(
        self, run: _Run, first: list[Delta], stream: AsyncGenerator[list[Delta]]
    ) -> AsyncGenerator[bytes]:
        exchange, reply = run.exchange, run.reply
        try:
            # What is there together leaves together: each piece has a price of its own on its way out.
            opening = b"".join(map(event, reply.opening(exchange.num_choices)))
            yield opening + run.event(first)
            while (deltas := await anext(stream, None)) is not None:
                yield run.event(deltas)
            usage = run.usage_event() if run.body.includes_usage else b""
            run.count.end(exchange.mode, 200)
            yield usage + DONE
        except Exception as error:
            self._count_failure(run.count, exchange.mode, error)
            yield event(self._http_error(error, run.request_id).body)

    # -- checks and errors ---------------------------------------------------------------------------------------------

    def _check_model(self, body: GenerationBody) -> None:
        served = self._config.model.served_name
        if body.model is not None and body.model != served:
            raise ModelNotFoundError(f"there is no model {body.model!r} here; this server has {served!r}")

    def _wish(self, http: HttpRequest, body: GenerationBody) -> Wish:
        """Read the mode from the body, else from the header. Raises ``InvalidRequestError``."""
        mode, param = body.epd.mode, "epd.mode"
        if mode is None:
            param = MODE_HEADER
            try:
                mode = Mode(http.headers.get(MODE_HEADER, Mode.AUTO))
            except ValueError:
                known = ", ".join(each.value for each in Mode)
                raise InvalidRequestError(f"{MODE_HEADER} must be one of {known}", MODE_HEADER) from None
        formable = self._config.modes
        if mode is not Mode.AUTO and mode not in formable:
            names = ", ".join(each.value for each in formable)
            raise UnsupportedModeError(f"{param}: the pools cannot form {mode.value}; they can form {names}", param)
        slo = self._config.router.slo.to_slo()
        return Wish(mode, body.epd.slo.over(slo) if body.epd.slo is not None else slo)

    def _count_failure(self, count: RequestCount, mode: str, error: Exception) -> None:
        if isinstance(error, AdmissionRejectedError):
            self._metrics.rejected(error.reason)
        count.end(mode, to_http(error, "").status)

    def _error_reply(self, error: Exception, request_id: str) -> Response:
        reply = self._http_error(error, request_id)
        return JSONResponse(reply.body, status_code=reply.status, headers=reply.headers)

    @staticmethod
    def _http_error(error: Exception, request_id: str) -> HttpError:
        reply = to_http(error, request_id)
        if reply.status == 500:
            logger.error("request %s failed", request_id, exc_info=error)
        return reply


async def read_body(http: HttpRequest, max_bytes: int) -> bytes:
    """Return the body, counted while it arrives. Raises ``BodyTooLargeError``."""
    message = f"the body is over the limit of {max_bytes} bytes"
    announced = http.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise BodyTooLargeError(message)
    parts: list[bytes] = []
    num_bytes = 0
    async for part in http.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise BodyTooLargeError(message)
        parts.append(part)
    return b"".join(parts)


def _request_id(http: HttpRequest) -> str:
    """Return the id under which Serve logs the request (the client's own, if it sent one), or a new one."""
    given = http.headers.get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.fullmatch(given) else uuid4().hex
