"""Chat messages and raw prompts to token ids, with one placeholder token per media part, in the order of the parts.

Text comes out exactly as ``tokenizer.apply_chat_template`` would have it, except that control tokens spelled out by a
user stay text. Knows nothing of how many tokens an image takes: the model family expands placeholders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from epd.errors import ConfigError, InvalidRequestError, PromptTooLongError
from epd.prompt.messages import Conversation, MediaPart, parse_messages
from epd.prompt.tokenizer import TextTokenizer
from epd.types import Modality

_PLACEHOLDER_KEYS = {
    Modality.IMAGE: ("image_token_id", "image_token_index"),
    Modality.VIDEO: ("video_token_id", "video_token_index"),
}
_PROBE = "epd-template-probe"


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt ready for the model family: ``token_ids`` holds one placeholder for each of ``media``, in order."""

    text: str
    token_ids: tuple[int, ...]
    media: tuple[MediaPart, ...] = ()

    @property
    def modalities(self) -> tuple[Modality, ...]:
        return tuple(part.modality for part in self.media)


class ChatPrompt:
    """Renders the prompts of one checkpoint. ``placeholders`` maps a modality to the token that stands for an item.

    ``max_prompt_tokens`` lets a prompt that is certainly too long be refused before it is tokenized.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        placeholders: Mapping[Modality, str],
        *,
        chat_template: str | None = None,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._template = chat_template or tokenizer.hf.chat_template
        self._max_chars = None if max_prompt_tokens is None else max_prompt_tokens * tokenizer.max_token_chars
        self._max_prompt_tokens = max_prompt_tokens
        self._modality_of: dict[int, Modality] = {}
        for modality, content in placeholders.items():
            token_id = tokenizer.token_id(content)
            if token_id is None:
                raise ConfigError("args.model.source", f"the tokenizer has no {modality.value} token {content!r}")
            self._modality_of[token_id] = modality
        self._takes_strings = self._renders(_PROBE)
        self._takes_parts = self._renders([{"type": "text", "text": _PROBE}])

    @classmethod
    def from_pretrained(cls, directory: Path | str, *, max_prompt_tokens: int | None = None) -> ChatPrompt:
        """Load tokenizer, chat template and placeholder tokens from a checkpoint directory. Raises ``ConfigError``."""
        directory = Path(directory)
        tokenizer = TextTokenizer.from_pretrained(directory)
        placeholders = _placeholders(directory, tokenizer)
        if placeholders:
            tokenizer = TextTokenizer(tokenizer.hf, placeholders.values())
        template = tokenizer.hf.chat_template or _processor_template(directory)
        return cls(tokenizer, placeholders, chat_template=template, max_prompt_tokens=max_prompt_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Render OpenAI messages.

        Raises:
            InvalidRequestError: malformed messages, or messages that the model's template cannot express.
            PromptTooLongError: certainly more than ``max_prompt_tokens``.
        """
        conversation = parse_messages(messages)
        values: list[Any] = [conversation.messages, list(tools or []), dict(template_kwargs or {})]
        self._check_length(sum(map(len, _strings(values))))
        mark = self.tokenizer.choose_mark([self._template or "", *_strings(values)])
        guarded_messages, guarded_tools, guarded_kwargs = self._guarded(values, mark)
        text = self._apply(
            [self._fit_content(message) for message in guarded_messages],
            tools=guarded_tools or None,
            add_generation_prompt=add_generation_prompt,
            **guarded_kwargs,
        )
        self._check_length(len(text))
        token_ids = self.tokenizer.encode_guarded(text, mark)
        self._check_placeholders(token_ids, conversation)
        return RenderedPrompt(text.replace(mark, ""), tuple(token_ids), conversation.media)

    def render_raw(self, prompt: str | Sequence[int], *, param: str = "prompt") -> RenderedPrompt:
        """Take a prompt without a chat template, as text (control tokens in it count as such) or as token ids.

        Raises:
            InvalidRequestError: empty, ids that are no tokens, or placeholders, for which a raw prompt has no media.
            PromptTooLongError: certainly more than ``max_prompt_tokens``.
        """
        if isinstance(prompt, str):
            self._check_length(len(prompt))
            text, token_ids = prompt, self.tokenizer.encode(prompt, add_special_tokens=True)
        else:
            token_ids = list(prompt)
            for token_id in token_ids:
                if type(token_id) is not int or token_id < 0 or not self.tokenizer.has_token(token_id):
                    raise InvalidRequestError(f"{token_id!r} is not a token id of this model", param)
            text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        if not token_ids:
            raise InvalidRequestError("the prompt is empty", param)
        if any(token_id in self._modality_of for token_id in token_ids):
            raise InvalidRequestError("the prompt has a media placeholder, but a raw prompt carries no media", param)
        return RenderedPrompt(text, tuple(token_ids))

    def _apply(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        if self._template is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", "messages")
        try:
            text: str = self.tokenizer.hf.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, **kwargs
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequestError(
                f"the model's chat template refuses the messages: {reason}", "messages"
            ) from error
        return text

    def _renders(self, content: str | list[dict[str, Any]]) -> bool:
        """Whether the template prints a user's content of this form as it is."""
        if self._template is None:
            return False
        try:
            text = self._apply([{"role": "user", "content": content}], add_generation_prompt=False)
        except InvalidRequestError:
            return False
        return _PROBE in text and not (isinstance(content, list) and "'text'" in text)

    def _fit_content(self, message: dict[str, Any]) -> dict[str, Any]:
        """Give text in the only form that the template takes, if it takes only one."""
        content = message["content"]
        if isinstance(content, str) and not self._takes_strings and self._takes_parts:
            return {**message, "content": [{"type": "text", "text": content}]}
        wants_string = self._takes_strings and not self._takes_parts
        if wants_string and isinstance(content, list) and all(part["type"] == "text" for part in content):
            return {**message, "content": "\n".join(part["text"] for part in content)}
        return message

    def _guarded(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self.tokenizer.guard(value, mark)
        if isinstance(value, Mapping):
            return {self._guarded(key, mark): self._guarded(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(item, mark) for item in value]
        return value

    def _check_length(self, num_chars: int) -> None:
        if self._max_chars is not None and num_chars > self._max_chars:
            raise PromptTooLongError(
                f"the prompt of {num_chars} characters cannot fit into {self._max_prompt_tokens} tokens", "messages"
            )

    def _check_placeholders(self, token_ids: Sequence[int], conversation: Conversation) -> None:
        found = [self._modality_of[token_id] for token_id in token_ids if token_id in self._modality_of]
        wanted = [part.modality for part in conversation.media]
        for index, part in enumerate(conversation.media):
            if part.modality not in self._modality_of.values():
                raise InvalidRequestError(f"this model does not take {part.modality.value}s", part.param)
            if index >= len(found) or found[index] is not part.modality:
                raise InvalidRequestError(
                    f"the model's chat template does not place this {part.modality.value} in the prompt", part.param
                )
        if found != wanted:
            raise InvalidRequestError("the prompt has more media placeholders than media", "messages")


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in nested data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _placeholders(directory: Path, tokenizer: TextTokenizer) -> dict[Modality, str]:
    """Read which token stands for an image or a clip from the model's configuration."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    placeholders = {}
    for modality, keys in _PLACEHOLDER_KEYS.items():
        token_id = next((config[key] for key in keys if isinstance(config.get(key), int)), None)
        content = None if token_id is None else tokenizer.token_content(token_id)
        if content is not None:
            placeholders[modality] = content
    return placeholders


def _processor_template(directory: Path) -> str | None:
    """Return the chat template that older checkpoints keep with the processor."""
    path = directory / "chat_template.json"
    template = json.loads(path.read_text()).get("chat_template") if path.is_file() else None
    return template if isinstance(template, str) else None
