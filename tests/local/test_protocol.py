"""Request bodies. If these fail, a client's option is silently dropped, or a body of an OpenAI client is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.protocol import ChatBody, CompletionBody, parse_body
from epd.errors import InvalidRequestError
from epd.types import SLO, Mode


def chat(**fields: Any) -> ChatBody:
    return parse_body(ChatBody, json.dumps({"messages": [], **fields}).encode())


def completion(**fields: Any) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({"prompt": "x", **fields}).encode())


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000, b"null"])
def test_what_is_no_json_object_is_refused(raw: bytes):
    with pytest.raises(InvalidRequestError, match="the body"):
        parse_body(ChatBody, raw)


def test_the_part_at_fault_is_named():
    for fields, param in (
        ({"epd": {"trace": True, "moed": "epd"}}, "epd.moed"),
        ({"epd": {"mode": "pd"}}, "epd.mode"),
        ({"epd": {"slo": {"ttft": 1}}}, "epd.slo.ttft"),
        ({"n": 129}, "n"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": 5}, "stream_options"),
    ):
        with pytest.raises(InvalidRequestError) as failure:
            chat(**fields)
        assert failure.value.param == param
    with pytest.raises(InvalidRequestError) as failure:
        parse_body(ChatBody, b"{}")
    assert failure.value.param == "messages"


@pytest.mark.parametrize("fields", [{"echo": True}, {"suffix": "!"}, {"best_of": 2}, {"prompt": []}, {"prompt": [[]]}])
def test_what_completions_cannot_do_is_refused_by_name(fields: dict[str, Any]):
    with pytest.raises(InvalidRequestError) as failure:
        completion(**fields)
    assert failure.value.param == next(iter(fields))


def test_placement_wishes_are_read():
    options = chat(epd={"mode": "e_pd", "trace": True, "slo": {"ttft_s": 2}}).epd
    assert (options.mode, options.trace) == (Mode.E_PD, True)
    assert options.slo is not None
    assert options.slo.over(SLO(1.0, 0.05)) == SLO(2.0, 0.05)
    assert chat().epd.mode is None


def test_the_newer_name_of_the_output_limit_wins():
    assert chat(max_tokens=5).output_limit == 5
    assert chat(max_tokens=5, max_completion_tokens=7).output_limit == 7
    assert chat().output_limit is None


def test_logprobs_mean_what_they_mean_at_each_endpoint():
    assert chat().num_logprobs is None
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).num_logprobs == 3
    assert completion().num_logprobs is None
    assert completion(logprobs=2).num_logprobs == 2


def test_stop_is_one_string_or_several_and_empty_ones_are_none():
    assert chat(stop="a").stop_strings == ("a",)
    assert chat(stop=["a", "", "b"]).stop_strings == ("a", "b")
    assert chat(stop="").stop_strings == ()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_a_prompt_is_text_or_tokens_one_or_several(prompt: Any, prompts: list[Any]):
    assert completion(prompt=prompt).prompts == prompts


def test_tools_that_are_switched_off_are_no_error():
    assert chat(tools=[{"type": "function"}], tool_choice="none", response_format={"type": "text"})


def test_a_request_without_a_seed_gets_one_of_its_own():
    assert chat(seed=0).seed_or_random == 0
    assert chat().seed_or_random != chat().seed_or_random
