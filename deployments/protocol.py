"""The HTTP bodies of the OpenAI-compatible endpoints, and their validation. Knows nothing of models or stages.

Unknown top-level fields are ignored, as OpenAI clients expect of servers; unknown fields inside ``epd`` are refused,
because a misspelt mode would silently measure the wrong thing. A field that is known but not supported is refused too.
"""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from epd.errors import InvalidRequestError
from epd.types import SLO, Mode

Body = TypeVar("Body", bound="GenerationBody")


class EpdOptions(BaseModel):
    """The ``epd`` field: how this request is to be placed and reported."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Mode | None = None
    trace: bool = False
    slo: SloOptions | None = None


class SloOptions(BaseModel):
    """The request's own service level objective, in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft_s: Annotated[float, Field(gt=0)] | None = None
    itl_s: Annotated[float, Field(gt=0)] | None = None

    def over(self, default: SLO) -> SLO:
        return SLO(self.ttft_s or default.ttft_s, self.itl_s or default.itl_s)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    include_usage: bool = False


class GenerationBody(BaseModel):
    """What both endpoints share: sampling, stopping, streaming and placement."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None
    epd: EpdOptions = EpdOptions()
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    ignore_eos: bool = False
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    user: str | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in stop if text)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to report per token; ``None`` for no logprobs at all."""
        raise NotImplementedError

    @property
    def seed_or_random(self) -> int:
        return self.seed if self.seed is not None else secrets.randbits(63)


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``. The messages are checked by whoever renders them (``epd.prompt``)."""

    messages: Any
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None

    @model_validator(mode="after")
    def _only_what_is_supported(self) -> Self:
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise ValueError("response_format: only the type 'text' is supported")
        if self.tools and self.tool_choice != "none":
            raise ValueError("tools: tool calls are not supported")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs to be true")
        return self

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _only_what_is_supported(self) -> Self:
        if self.echo:
            raise ValueError("echo: echoing the prompt is not supported")
        if self.suffix:
            raise ValueError("suffix: text after the completion is not supported")
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of: only best_of equal to n is supported")
        if isinstance(self.prompt, list) and (not self.prompt or any(part == [] for part in self.prompt)):
            raise ValueError("prompt: must not be empty")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(part, int) for part in self.prompt):
            return [[part for part in self.prompt if isinstance(part, int)]]
        return [part for part in self.prompt if not isinstance(part, int)]

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


def parse_body(kind: type[Body], raw: bytes) -> Body:
    """Parse and validate a JSON body. Raises ``InvalidRequestError`` naming the part at fault."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequestError("the body must be a JSON object")
    try:
        # A JSON null means the same as an absent field.
        return kind.model_validate({name: value for name, value in data.items() if value is not None})
    except ValidationError as error:
        raise _invalid(error) from error


def _invalid(error: ValidationError) -> InvalidRequestError:
    first = _deepest(error.errors(include_url=False, include_input=False))
    param = _param(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown field"
    elif first["type"] == "value_error" and not param:
        param, _, message = message.partition(": ")
    elif first["type"] in ("model_type", "dict_type"):
        message = "must be a JSON object"
    elif first["type"] == "missing":
        message = "is required"
    return InvalidRequestError(f"{param}: {message}", param)


def _deepest(faults: list[ErrorDetails]) -> ErrorDetails:
    """Of a union's faults, one for each type that was tried, return that of the type which fitted best."""
    location = faults[0]["loc"]
    field = location[:-1] if location and _is_label(location, len(location) - 1) else location
    return max((fault for fault in faults if fault["loc"][: len(field)] == field), key=lambda fault: len(fault["loc"]))


def _param(location: tuple[int | str, ...]) -> str:
    """Write a location as ``stop[0]``, without pydantic's names of union members."""
    path = ""
    for position, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _is_label(location, position):
            path += f".{part}" if path else part
    return path


def _is_label(location: tuple[int | str, ...], position: int) -> bool:
    """Whether a part names a union's member: it follows a field with several types."""
    part, before = location[position], location[position - 1] if position else None
    return isinstance(part, str) and ("[" in part or (part in ("str", "int") and before in ("stop", "prompt")))


EpdOptions.model_rebuild()
