"""A checkpoint's tokenizer: text to token ids, with text that only *spells* a control token kept as text.

Wraps a `transformers` fast tokenizer. Knows nothing of messages or media. Thread-safe: nothing changes after
construction.

A control token ends a turn, opens a role or stands for an image. Only the chat template may write one; the same letters
in what a user wrote are letters. So whoever mixes both marks the user's part (``guard``), and ``encode_guarded`` reads
control tokens from the unmarked text alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders

from epd.errors import ConfigError, InvalidRequestError

_PRIVATE_USE = range(0xE000, 0xF900)
_SPACE = re.compile(r"\s+")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextTokenizer:
    """``control_tokens`` adds to the tokens that the tokenizer itself calls special, e.g. a model's placeholders."""

    def __init__(self, tokenizer: Any, control_tokens: Collection[str] = ()) -> None:
        self.hf = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._plain = Tokenizer.from_str(self._backend.to_str())
        self._plain.encode_special_tokens = True
        self._added: dict[int, AddedToken] = self._backend.get_added_tokens_decoder()
        contents = {token.content for token in self._added.values() if token.special} | set(control_tokens)
        self._plain.add_special_tokens(
            [AddedToken(content, special=True, normalized=False) for content in control_tokens]
        )
        self._special_ids = frozenset(token_id for token_id, token in self._added.items() if token.special)
        found = {content: self._backend.token_to_id(content) for content in contents}
        self._control_id: dict[str, int] = {
            content: token_id for content, token_id in found.items() if token_id is not None
        }
        self._control_ids = frozenset(self._control_id.values())
        # A token of one character cannot be broken up by a guard. None of those controls anything in practice.
        spellings = sorted((content for content in self._control_id if len(content) > 1), key=len, reverse=True)
        alternatives = "|".join(map(re.escape, spellings)) or r"(?!)"
        self._control = re.compile(alternatives)
        self._control_start = re.compile(rf"(?=(?:{alternatives}))(.)", re.DOTALL)
        self._prefixes = frozenset(text[:length] for text in spellings for length in range(1, len(text)))
        self._longest_prefix = max(map(len, self._prefixes), default=0)

    @classmethod
    def from_pretrained(cls, directory: Path | str, control_tokens: Collection[str] = ()) -> TextTokenizer:
        """Load from a checkpoint directory. Raises ``ConfigError`` if there is no usable tokenizer."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError("args.model.source", f"no tokenizer could be loaded from {directory}: {error}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError("args.model.source", f"{directory} has no fast tokenizer (tokenizer.json)")
        return cls(tokenizer, control_tokens)

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @cached_property
    def max_token_chars(self) -> int:
        """Length of the longest token: a text has at least its length divided by this many tokens."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether the text of tokens is the UTF-8 decoding of their joined bytes, and nothing else."""
        return isinstance(self._backend.decoder, decoders.ByteLevel)

    def token_id(self, content: str) -> int | None:
        """Return the id of a token by its content."""
        token_id: int | None = self._backend.token_to_id(content)
        return token_id

    def token_content(self, token_id: int) -> str | None:
        """Return the content of a token by its id."""
        content: str | None = self._backend.id_to_token(token_id)
        return content

    def is_special(self, token_id: int) -> bool:
        """Whether a token is left out of the text that users see."""
        return token_id in self._special_ids

    def has_token(self, token_id: int) -> bool:
        """Whether an id stands for a token; models have spare rows."""
        return self._backend.id_to_token(token_id) is not None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return token ids; control tokens spelled in the text become control tokens."""
        # The fast variant leaves out where each token came from, which takes most of the time of the other.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Ids that stand for nothing are left out."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token contributes to the text, which may be part of a character."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            if all(character in _BYTE_OF_CHARACTER for character in token):
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            return str(token).encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte:
            return bytes([int(byte[1], 16)])
        return self.decode([token_id], skip_special_tokens=False).encode()

    # ----------------------------------------------------------------------------------------------------------------
    # Text of users
    # ----------------------------------------------------------------------------------------------------------------

    def choose_mark(self, texts: Iterable[str]) -> str:
        """Return a character that none of the texts contains, to guard with."""
        used = set().union(*map(set, texts))
        for code in _PRIVATE_USE:
            if chr(code) not in used:
                return chr(code)
        raise InvalidRequestError("the messages use every private-use character of Unicode", "messages")

    def guard(self, text: str, mark: str) -> str:
        """Return the text with a mark inside everything that spells a control token, or begins to at the end.

        The end counts, without its trailing space, because the next piece of the prompt might complete it.
        """
        guarded = self._control_start.sub(rf"\1{mark}", text)
        end = len(guarded.rstrip())
        for length in range(min(self._longest_prefix, end), 0, -1):
            if guarded[end - length : end] in self._prefixes:
                return guarded[:end] + mark + guarded[end:]
        return guarded

    def encode_guarded(self, text: str, mark: str) -> list[int]:
        """Return the token ids of a text with guarded parts: what is guarded comes out as it was written, as text.

        A text without marks is encoded in one go, exactly as ``encode`` does. Raises ``InvalidRequestError`` if the
        vocabulary has no way to spell a control token as text.
        """
        if mark not in text:
            ids = self.encode(text)
            num_control = sum(token_id in self._control_ids for token_id in ids)
            if num_control > len(self._control.findall(text)):  # e.g. after Unicode normalization
                raise InvalidRequestError("the text spells a control token of the model in disguise", "messages")
            return ids
        segments, control_ids, start = [], [], 0
        for match in self._control.finditer(text):
            token_id = self._control_id[match[0]]
            token = self._added.get(token_id)
            segment = text[start : match.start()]
            segments.append(segment.rstrip() if token is not None and token.lstrip else segment)
            control_ids.append(token_id)
            start = match.end()
            if token is not None and token.rstrip and (space := _SPACE.match(text, start)):
                start = space.end()
        segments.append(text[start:])
        plain = self._encode_plain([segment.replace(mark, "") for segment in segments])
        ids = plain[0]
        for token_id, segment_ids in zip(control_ids, plain[1:], strict=True):
            ids += [token_id, *segment_ids]
        return ids

    def _encode_plain(self, texts: list[str]) -> list[list[int]]:
        encodings = self._plain.encode_batch_fast(texts, add_special_tokens=False)
        batch = [encoding.ids for encoding in encodings]
        if not all(self._control_ids.isdisjoint(ids) for ids in batch):
            raise InvalidRequestError(
                "the text spells a control token of the model, which it cannot read as text", "messages"
            )
        return batch


def _byte_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()
