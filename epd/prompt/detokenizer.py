"""Output tokens to text while they arrive. Knows nothing of HTTP or of who makes the tokens.

What has been returned is final: characters are complete, and no part of a stop string ever shows. The pieces joined are
the same text however the tokens were grouped, so a reply that is not streamed uses this too.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from epd.prompt.stop_strings import StopMatcher
from epd.prompt.tokenizer import TextTokenizer

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 6
"""A character is at most four bytes, so at most four tokens. What is still incomplete after more is no character."""


class IncrementalDetokenizer:
    """Turns the tokens of one choice into text, up to a stop string; constant work per token."""

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._text: _TokenText = _ByteText(tokenizer) if tokenizer.is_byte_level else _WindowText(tokenizer)
        self._matcher = StopMatcher(stop)
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; what follows it is ignored."""
        return self._matcher.matched is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._matcher.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is now certain.

        ``num_tokens`` counts the tokens taken, up to the one that completed a stop string.
        """
        pieces = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            if self._skip_special_tokens and self._tokenizer.is_special(token_id):
                continue
            pieces.append(self._matcher.push(self._text.push(token_id)))
        return "".join(pieces)

    def finish(self) -> str:
        """Return the rest, when no more tokens come: an incomplete character is shown as U+FFFD."""
        return self._matcher.push(self._text.finish()) + self._matcher.finish()


class _TokenText(Protocol):
    """The text that tokens add, as soon as it is certain."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class _ByteText:
    """For byte-level vocabularies, where text is the UTF-8 decoding of the joined bytes."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowText:
    """For other vocabularies, where a token's text depends on the ones before it (a leading space, a run of bytes).

    The last tokens whose text was returned are decoded again together with the new ones, and the difference is new. The
    method is that of Text Generation Inference.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if not self._tokenizer.has_token(token_id):
            return ""
        self._held.append(token_id)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        if text or len(self._held) >= _MAX_HELD_TOKENS:
            self._shown, self._held = self._held, []
        return text

    def finish(self) -> str:
        text = self._new_text()
        self._held = []
        return text

    def _new_text(self) -> str:
        def decode(token_ids: list[int]) -> str:
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)

        return decode(self._shown + self._held)[len(decode(self._shown)) :]
