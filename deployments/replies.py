"""OpenAI response objects for both endpoints, whole and in chunks. Pure; knows nothing of HTTP, stages or Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from deployments.generation import Delta
from epd.types import TokenLogprob

TokenBytes = Callable[[int], bytes]
"""Return what one token adds to the text, which may be part of a character."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; with several prompts, of all together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class ReplyFormat(Protocol):
    """How an endpoint writes what was generated. One object per reply."""

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """Return the chunks that precede all text of a stream."""
        ...

    def chunk(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return one stream chunk."""
        ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]: ...

    def whole(self, deltas: Sequence[Delta], num_choices: int, usage: Usage) -> dict[str, Any]:
        """Return the reply that is not streamed."""
        ...


@dataclass(slots=True)
class _Envelope:
    model: str
    token_bytes: TokenBytes
    reply_id: str = field(default_factory=lambda: uuid4().hex)
    created_s: int = field(default_factory=lambda: int(time.time()))

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def wrapped(self, prefix: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{self.reply_id}",
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
        }


class ChatReply(_Envelope):
    """``chat.completion`` and ``chat.completion.chunk``."""

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self.wrapped("chatcmpl", "chat.completion.chunk", choices)

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        choices = [
            {"index": index, "delta": dict(role), "logprobs": None, "finish_reason": None}
            for index in range(num_choices)
        ]
        return [self._chunk([choice]) for choice in choices]

    def chunk(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        choices = [
            {
                "index": delta.choice,
                "delta": {"content": delta.text} if delta.text else {},
                "logprobs": self._logprobs(delta.logprobs),
                "finish_reason": delta.finish_reason,
            }
            for delta in deltas
        ]
        return self._chunk(choices)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._chunk([]), "usage": usage.body}

    def whole(self, deltas: Sequence[Delta], num_choices: int, usage: Usage) -> dict[str, Any]:
        choices = []
        for index in range(num_choices):
            own = [delta for delta in deltas if delta.choice == index]
            message = {"role": "assistant", "content": "".join(delta.text for delta in own), "refusal": None}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(tuple(entry for delta in own for entry in delta.logprobs)),
                    "finish_reason": own[-1].finish_reason if own else None,
                }
            )
        return {**self.wrapped("chatcmpl", "chat.completion", choices), "usage": usage.body}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not entries:
            return None
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.token_text(token_id), "logprob": logprob, "bytes": list(self.token_bytes(token_id))}


class CompletionReply(_Envelope):
    """``text_completion``, whole and in chunks."""

    def __init__(self, model: str, token_bytes: TokenBytes) -> None:
        super().__init__(model, token_bytes)
        self._offsets: dict[int, int] = {}

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        return []

    def chunk(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        return self.wrapped("cmpl", "text_completion", [self._choice(delta) for delta in deltas])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self.wrapped("cmpl", "text_completion", []), "usage": usage.body}

    def whole(self, deltas: Sequence[Delta], num_choices: int, usage: Usage) -> dict[str, Any]:
        choices = []
        for index in range(num_choices):
            own = [delta for delta in deltas if delta.choice == index]
            merged = Delta(
                index,
                "".join(delta.text for delta in own),
                sum(delta.num_tokens for delta in own),
                own[-1].finish_reason if own else None,
                tuple(entry for delta in own for entry in delta.logprobs),
            )
            choices.append(self._choice(merged))
        return {**self.wrapped("cmpl", "text_completion", choices), "usage": usage.body}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.choice,
            "text": delta.text,
            "logprobs": self._logprobs(delta) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        tokens = [self.token_text(entry.token_id) for entry in delta.logprobs]
        offsets = []
        for token in tokens:
            offset = self._offsets.get(delta.choice, 0)
            offsets.append(offset)
            self._offsets[delta.choice] = offset + len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in delta.logprobs],
            "top_logprobs": [
                {self.token_text(token_id): logprob for token_id, logprob in entry.top} for entry in delta.logprobs
            ],
            "text_offset": offsets,
        }
