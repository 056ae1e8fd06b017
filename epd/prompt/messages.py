"""OpenAI chat messages to what chat templates expect, and the media parts found on the way, in order.

Checks the shape of messages and names the part at fault. Knows nothing of tokens, and does not look at what a media URL
leads to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epd.errors import InvalidRequestError
from epd.types import Modality

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MEDIA_KEYS = {
    "image_url": ("image_url", Modality.IMAGE),
    "input_image": ("image_url", Modality.IMAGE),
    "video_url": ("video_url", Modality.VIDEO),
    "input_video": ("video_url", Modality.VIDEO),
}
_DETAILS = ("auto", "low", "high")
_PASSED_ON = ("name", "tool_call_id", "reasoning_content")


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A media part of a request as the client sent it. ``param`` names it, e.g. ``messages[0].content[1]``."""

    modality: Modality
    url: str
    detail: str
    param: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for a chat template, whose media parts are ``{"type": "image"}`` or ``"video"``; ``media`` in order."""

    messages: list[dict[str, Any]]
    media: tuple[MediaPart, ...]


def parse_messages(messages: Sequence[Mapping[str, Any]]) -> Conversation:
    """Check OpenAI messages and bring them into the form that chat templates expect.

    Raises:
        InvalidRequestError: naming the message or part.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages must be a list with at least one message", "messages")
    media: list[MediaPart] = []
    return Conversation([_message(m, f"messages[{i}]", media) for i, m in enumerate(messages)], tuple(media))


def _message(message: Mapping[str, Any], param: str, media: list[MediaPart]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError("a message must be an object", param)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequestError(f"the role must be one of {', '.join(_ROLES)}", f"{param}.role")
    parsed: dict[str, Any] = {"role": _ROLES[role]}
    content = message.get("content")
    if content is None and role == "assistant":
        content = message.get("refusal") or ""
    parsed["content"] = _content(content, f"{param}.content", media)
    for key in _PASSED_ON:
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise InvalidRequestError(f"{key} must be a string", f"{param}.{key}")
            parsed[key] = message[key]
    if message.get("tool_calls"):
        parsed["tool_calls"] = _tool_calls(message["tool_calls"], f"{param}.tool_calls")
    return parsed


def _content(content: Any, param: str, media: list[MediaPart]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not content:
        raise InvalidRequestError("the content must be a string or a list of parts", param)
    return [_part(part, f"{param}[{index}]", media) for index, part in enumerate(content)]


def _part(part: Any, param: str, media: list[MediaPart]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise InvalidRequestError("a content part must be an object", param)
    kind = part.get("type")
    if isinstance(kind, str) and kind in _TEXT_KEYS:
        text = part.get(_TEXT_KEYS[kind])
        if not isinstance(text, str):
            raise InvalidRequestError(f"a part of type {kind} needs a string in {_TEXT_KEYS[kind]!r}", param)
        return {"type": "text", "text": text}
    if isinstance(kind, str) and kind in _MEDIA_KEYS:
        key, modality = _MEDIA_KEYS[kind]
        media.append(_media_part(part, kind, key, modality, param))
        return {"type": modality.value}
    supported = ", ".join([*_TEXT_KEYS, *_MEDIA_KEYS])
    raise InvalidRequestError(f"the type of a content part must be one of {supported}", param)


def _media_part(part: Mapping[str, Any], kind: str, key: str, modality: Modality, param: str) -> MediaPart:
    value = part.get(key)
    url, detail = value, part.get("detail")
    if isinstance(value, Mapping):
        url, detail = value.get("url"), value.get("detail", detail)
    if not isinstance(url, str) or not url.strip():
        raise InvalidRequestError(f"a part of type {kind} needs a URL in {key!r}", param)
    detail = "auto" if detail is None else detail
    if detail not in _DETAILS:
        raise InvalidRequestError(f"detail must be one of {', '.join(_DETAILS)}", param)
    return MediaPart(modality, url, detail, param)


def _tool_calls(calls: Any, param: str) -> list[dict[str, Any]]:
    """Parse each call's arguments from JSON, as templates expect them."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidRequestError("tool_calls must be a list", param)
    parsed = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequestError("a tool call needs a function with a name", f"{param}[{index}]")
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise InvalidRequestError("the arguments are not valid JSON", f"{param}[{index}]") from error
        if not isinstance(arguments, Mapping):
            raise InvalidRequestError("the arguments must be a JSON object", f"{param}[{index}]")
        parsed.append({"type": "function", **call, "function": {"name": function["name"], "arguments": arguments}})
    return parsed
