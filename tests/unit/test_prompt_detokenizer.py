"""If this fails, users see broken characters, pieces of stop strings, or a stream that differs from the whole reply."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.errors import InvalidRequestError
from epd.prompt.detokenizer import IncrementalDetokenizer
from epd.prompt.stop_strings import StopMatcher
from epd.prompt.tokenizer import TextTokenizer
from tests.tiny_tokenizer import byte_level_tokenizer, word_tokenizer

BYTE_LEVEL = TextTokenizer(byte_level_tokenizer())
WORDS = TextTokenizer(word_tokenizer())


def stream(tokenizer: TextTokenizer, chunks: Sequence[Sequence[int]], stop: Sequence[str] = ()) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, stop)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


def cut(token_ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    chunks, start = [], 0
    for size in sizes:
        chunks.append(token_ids[start : start + size])
        start += size
    return [*chunks, token_ids[start:]]


def token_lists(tokenizer: TextTokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40)


chunk_sizes = st.lists(st.integers(0, 5), max_size=20)


@given(token_lists(BYTE_LEVEL), chunk_sizes)
@settings(deadline=None)
def test_any_tokens_in_any_chunks_join_to_the_text_that_the_tokenizer_decodes(ids: list[int], sizes: list[int]) -> None:
    assert "".join(stream(BYTE_LEVEL, cut(ids, sizes))) == BYTE_LEVEL.decode(ids)


@given(token_lists(WORDS), chunk_sizes)
@settings(deadline=None)
def test_tokens_that_depend_on_their_neighbours_join_to_the_same_text_in_any_chunks(
    ids: list[int], sizes: list[int]
) -> None:
    assert "".join(stream(WORDS, cut(ids, sizes))) == "".join(stream(WORDS, [ids]))


@given(st.text(max_size=60), chunk_sizes)
@settings(deadline=None)
def test_any_text_survives_tokens_and_chunks(text: str, sizes: list[int]) -> None:
    for tokenizer in (BYTE_LEVEL, WORDS):
        ids = tokenizer.encode(text)
        assert "".join(stream(tokenizer, cut(ids, sizes))) == tokenizer.decode(ids)


@given(
    st.text(alphabet="abé🎉 ", max_size=30),
    st.lists(st.text("abé🎉 ", min_size=1, max_size=4), max_size=3),
    chunk_sizes,
)
@settings(deadline=None)
def test_stop_strings_cut_the_text_at_the_same_place_in_any_chunks(
    text: str, stop: list[str], sizes: list[int]
) -> None:
    ids = BYTE_LEVEL.encode(text)
    whole = "".join(stream(BYTE_LEVEL, [ids], stop))
    pieces = stream(BYTE_LEVEL, cut(ids, sizes), stop)
    assert "".join(pieces) == whole
    assert BYTE_LEVEL.decode(ids).startswith(whole)
    assert not any(string in whole for string in stop)
    shown = ""
    for piece in pieces[:-1]:  # what was shown is final: it is never part of a stop string that completes later
        shown += piece
        assert whole.startswith(shown)


def test_a_character_split_over_tokens_is_held_back_until_it_is_whole() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    ids = [BYTE_LEVEL.token_id(character) for character in "ðŁİĬ"]  # the four bytes of a confetti ball
    assert [detokenizer.push([token_id]) for token_id in ids if token_id is not None] == ["", "", "", "🎊"]
    assert detokenizer.finish() == ""


def test_a_character_that_never_completes_is_shown_once_at_the_end() -> None:
    token_id = BYTE_LEVEL.token_id("ð")
    assert token_id is not None
    assert stream(BYTE_LEVEL, [[token_id]]) == ["", "\ufffd"]


def test_endless_invalid_bytes_do_not_hold_back_the_text_for_ever() -> None:
    token_id = WORDS.token_id("<0x80>")
    assert token_id is not None
    detokenizer = IncrementalDetokenizer(WORDS)
    shown = "".join(detokenizer.push([token_id]) for _ in range(200))
    assert len(shown) > 190


def test_leading_spaces_of_words_are_kept_between_chunks() -> None:
    ids = WORDS.encode("What is in the image?")
    assert "".join(stream(WORDS, [[token_id] for token_id in ids])) == "What is in the image?"


def test_special_tokens_are_not_shown() -> None:
    ids = BYTE_LEVEL.encode("yes<|im_end|>")
    assert "".join(stream(BYTE_LEVEL, [ids])) == "yes"


def test_special_tokens_are_shown_on_request() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, skip_special_tokens=False)
    assert detokenizer.push(BYTE_LEVEL.encode("yes<|im_end|>")) + detokenizer.finish() == "yes<|im_end|>"


def test_a_stop_string_split_over_chunks_never_leaks() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, ["STOP"])
    pieces = [detokenizer.push(BYTE_LEVEL.encode(text)) for text in ("one ST", "O", "P two")]
    assert pieces == ["one ", "", ""]
    assert detokenizer.stopped
    assert detokenizer.stop_string == "STOP"
    assert detokenizer.push(BYTE_LEVEL.encode("three")) == ""
    assert detokenizer.finish() == ""


def test_text_that_only_begins_like_a_stop_string_is_shown() -> None:
    assert stream(BYTE_LEVEL, [BYTE_LEVEL.encode("one ST"), BYTE_LEVEL.encode("AR")], ["STOP"]) == ["one ", "STAR", ""]
    assert stream(BYTE_LEVEL, [BYTE_LEVEL.encode("one ST")], ["STOP"]) == ["one ", "ST"]


def test_tokens_are_counted_up_to_the_one_that_completes_the_stop_string() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, ["3"])
    ids = BYTE_LEVEL.encode("1 2 3 4 5 6")
    detokenizer.push(ids)
    assert BYTE_LEVEL.decode(ids[: detokenizer.num_tokens]) == "1 2 3"


def test_the_stop_string_that_completes_first_wins_however_the_text_arrives() -> None:
    for pieces in (["xabcd"], ["xa", "b", "cd"], list("xabcd")):
        matcher = StopMatcher(["abcd", "b", "bc"])
        assert "".join(map(matcher.push, pieces)) + matcher.finish() == "xa"
        assert matcher.matched == "b"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as error:
        IncrementalDetokenizer(BYTE_LEVEL, [""])
    assert error.value.param == "stop"


def test_work_per_token_does_not_grow_with_the_reply() -> None:
    calls: list[int] = []

    class Counting(TextTokenizer):
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            calls.append(len(token_ids))
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    tokenizer = Counting(word_tokenizer())
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token_id in tokenizer.encode("What is in the image? " * 50):
        detokenizer.push([token_id])
    assert max(calls) <= 12
