"""The quickstart through the real ``openai`` client. If these fail, a user who follows the README gets wrong answers, a
mode that silently runs elsewhere than asked, or errors that do not say what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.cluster.conftest import Server, configured, running
from tests.cluster.scenes import asking, noise, picture

MODES = ["aggregated", "e_pd", "ep_d", "epd", "auto"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def server(tiny_qwen_dir: Path) -> Iterator[Server]:
    document = configured(
        "quickstart.yaml",
        model={"source": str(tiny_qwen_dir), "name": "tiny"},
        ingress={"max_body_bytes": 16 << 20},
    )
    with running(document) as server:
        yield server
        server.assert_nothing_is_held()


def traced(mode: str) -> dict[str, Any]:
    return {"epd": {"mode": mode, "trace": True}}


def test_all_modes_give_the_same_text_and_say_which_ran(server: Server):
    client, messages = server.client(), asking("Which is red?", picture("red"), picture("blue", (60, 140)))
    texts = set()
    for mode in MODES:
        raw = client.chat.completions.with_raw_response.create(
            model="tiny", messages=messages, extra_body=traced(mode), **GREEDY
        )
        reply, trace = raw.parse(), json.loads(raw.text)["epd"]
        texts.add(reply.choices[0].message.content)
        assert raw.headers["x-epd-mode"] == trace["mode"]
        assert mode in ("auto", trace["mode"])
        assert reply.usage.completion_tokens == 12
        assert reply.choices[0].finish_reason == "length"
    assert len(texts) == 1, texts


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_joins_to_the_text_of_the_whole_reply(server: Server, mode: str):
    client, messages = server.client(), asking("Describe the image.", picture("green"))
    options = {"model": "tiny", "messages": messages, "extra_body": traced(mode), "seed": 7, "max_tokens": 24}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(stream=True, **options))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].model_extra["epd"]["placement"]["decode"]
    assert all("epd" not in chunk.model_extra for chunk in chunks[:-1])


def test_placements_are_three_replicas_in_epd_and_one_in_aggregated(server: Server):
    placements = {}
    for mode in ("epd", "aggregated", "e_pd", "ep_d"):
        reply = server.client().chat.completions.create(
            model="tiny", messages=asking("?", picture()), extra_body=traced(mode), **GREEDY
        )
        placement = reply.model_extra["epd"]["placement"]
        placements[mode] = (placement["encode"][0], placement["prefill"], placement["decode"])
    assert len(set(placements["epd"])) == 3
    assert len(set(placements["aggregated"])) == 1
    assert placements["e_pd"][0] != placements["e_pd"][1] == placements["e_pd"][2]
    assert placements["ep_d"][0] == placements["ep_d"][1] != placements["ep_d"][2]


def test_metrics_show_that_each_stage_ran_where_the_trace_says(server: Server):
    def counts() -> dict[tuple[str, str], float]:
        samples = server.metrics("epd_stage_requests_total")
        return {(sample.labels["replica"], sample.labels["stage"]): sample.value for sample in samples}

    for mode in ("epd", "aggregated"):
        before, kv_before = counts(), server.total("epd_transfer_bytes_total", kind="kv")
        reply = server.client().chat.completions.create(
            model="tiny",
            messages=asking("Who?", noise((84, 84), seed=MODES.index(mode))),
            extra_body=traced(mode),
            **GREEDY,
        )
        trace, after = reply.model_extra["epd"], counts()
        ran = {key for key in after if after[key] > before.get(key, 0)}
        placement = trace["placement"]
        assert ran == {
            (placement["encode"][0], "encode"),
            (placement["prefill"], "prefill"),
            (placement["decode"], "decode"),
        }
        moved = server.total("epd_transfer_bytes_total", kind="kv") - kv_before
        assert moved == trace["bytes"]["kv"]
        assert (moved > 0) == (mode == "epd")
    assert server.total("epd_requests_total", mode="epd", status="200") > 0
    assert server.metrics("epd_ttft_seconds_count", mode="epd")


def test_the_header_asks_for_a_mode_and_the_body_wins_over_it(server: Server):
    body = {"model": "tiny", "messages": asking("Hi", picture()), "max_tokens": 2}
    reply = server.http.post("/v1/chat/completions", json=body, headers={"x-epd-mode": "e_pd"})
    assert reply.headers["x-epd-mode"] == "e_pd"
    body["epd"] = {"mode": "epd"}
    reply = server.http.post("/v1/chat/completions", json=body, headers={"x-epd-mode": "e_pd"})
    assert reply.headers["x-epd-mode"] == "epd"
    assert "epd" not in reply.json()


def test_text_and_many_choices_and_logprobs(server: Server):
    reply = server.client().chat.completions.create(
        model="tiny", messages=asking("Hello"), n=3, seed=5, max_tokens=8, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in reply.choices}) > 1
    assert all(len(choice.logprobs.content) == 8 for choice in reply.choices)
    assert all(len(entry.top_logprobs) == 2 for entry in reply.choices[0].logprobs.content)


def test_usage_comes_once_at_the_end_of_a_stream_and_only_when_asked(server: Server):
    options = {"model": "tiny", "messages": asking("Hello"), "stream": True, **GREEDY}
    chunks = list(server.client().chat.completions.create(stream_options={"include_usage": True}, **options))
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in server.client().chat.completions.create(**options))


def test_a_repeated_prompt_reports_cached_tokens(server: Server):
    messages = asking("Count from one to ten: one, two, three, four, five, six, seven", picture("orange"))
    options = {"model": "tiny", "messages": messages, "extra_body": traced("aggregated"), **GREEDY}
    server.client().chat.completions.create(**options)
    again = server.client().chat.completions.create(**options)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert again.model_extra["epd"]["cached"]["prefix_tokens"] == again.usage.prompt_tokens_details.cached_tokens


def test_a_stop_string_ends_the_text_and_frees_the_request(server: Server):
    options = {"model": "tiny", "messages": asking("Hello"), "temperature": 0}
    full = server.client().chat.completions.create(max_tokens=40, **options).choices[0].message.content
    stop = full[len(full) // 2 : len(full) // 2 + 2]
    reply = server.client().chat.completions.create(max_tokens=1000, stop=[stop], **options)
    assert reply.choices[0].message.content == full[: full.index(stop)]
    assert reply.choices[0].finish_reason == "stop"
    streamed = server.client().chat.completions.create(max_tokens=1000, stop=[stop], stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == full[: full.index(stop)]
    server.assert_nothing_is_held()


def test_completions_take_several_prompts_as_text_or_tokens(server: Server):
    reply = server.client().completions.create(
        model="tiny", prompt=["one two", "three four"], n=2, temperature=0, max_tokens=4, logprobs=1
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.choices[0].text == reply.choices[1].text
    assert reply.usage.completion_tokens == 16
    assert len(reply.choices[0].logprobs.tokens) == 4
    by_tokens = server.client().completions.create(model="tiny", prompt=[65, 66, 67], temperature=0, max_tokens=4)
    streamed = server.client().completions.create(
        model="tiny", prompt=[65, 66, 67], temperature=0, max_tokens=4, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == by_tokens.choices[0].text


@pytest.mark.parametrize("mode", ["aggregated", "epd"])
def test_a_picture_beyond_the_message_limit_reaches_its_encoder(server: Server, mode: str):
    """Over 4 MiB it cannot travel inside a call, and a base64 body of it is larger still."""
    url = noise((1400, 1100))
    assert len(url) > 5 << 20
    reply = server.client().chat.completions.create(
        model="tiny", messages=asking("What?", url), extra_body=traced(mode), **GREEDY
    )
    assert reply.usage.completion_tokens == 12
    server.assert_nothing_is_held()


def bad_requests() -> dict[str, tuple[Any, int, str]]:
    """Return body, status and a part of the message by what is wrong with it."""
    hello = {"messages": asking("Hello"), "max_tokens": 4}
    return {
        "malformed JSON": (b'{"messages": ', 400, "not valid JSON"),
        "no object": (b"[]", 400, "JSON object"),
        "no messages": ({"max_tokens": 4}, 400, "messages"),
        "unknown field in epd": ({**hello, "epd": {"mod": "epd"}}, 400, "epd.mod"),
        "unknown mode": ({**hello, "epd": {"mode": "fast"}}, 400, "epd.mode"),
        "unknown model": ({**hello, "model": "gpt"}, 404, "gpt"),
        "undecodable image": ({**hello, "messages": asking("?", "data:image/png;base64,aGVsbG8=")}, 400, "content[0]"),
        "bad base64": ({**hello, "messages": asking("?", "data:image/png;base64,*")}, 400, "content[0]"),
        "second image undecodable": (
            {**hello, "messages": asking("?", picture(), "data:image/png;base64,aGVsbG8=")},
            400,
            "content[1]",
        ),
        "private address": ({**hello, "messages": asking("?", "http://127.0.0.1/x.png")}, 400, "content[0]"),
        "local file": ({**hello, "messages": asking("?", "file:///etc/passwd")}, 400, "content[0]"),
        "audio": ({**hello, "messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "content[0]"),
        "too many tokens asked for": ({**hello, "max_tokens": 5000}, 400, "2048"),
        "prompt over the context": ({**hello, "messages": asking("word " * 3000)}, 400, "2048"),
        "temperature": ({**hello, "temperature": -1}, 400, "temperature"),
        "too many images": ({**hello, "messages": asking("?", *[picture()] * 17)}, 400, "16"),
        "body over the limit": (b" " * (17 << 20), 413, "limit"),
    }


@pytest.mark.parametrize("name", list(bad_requests()))
def test_bad_input_is_refused_by_name_and_before_any_stage(server: Server, name: str):
    body, status, part = bad_requests()[name]
    before = server.total("epd_stage_requests_total")
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    reply = server.http.post("/v1/chat/completions", **content)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert part in error["message"]
    assert error["type"] == "invalid_request_error"
    assert server.total("epd_stage_requests_total") == before


def test_the_openai_client_raises_its_own_exceptions(server: Server):
    with pytest.raises(openai.BadRequestError, match=r"epd\.mode"):
        server.client().chat.completions.create(
            model="tiny", messages=asking("Hi"), extra_body={"epd": {"mode": "nope"}}
        )
    with pytest.raises(openai.NotFoundError):
        server.client().chat.completions.create(model="other", messages=asking("Hi"))


def test_models_version_health_and_unknown_paths(server: Server):
    assert [model.id for model in server.client().models.list()] == ["tiny"]
    assert server.http.get("/version").json().keys() == {"version"}
    assert server.http.get("/health").json() == {"status": "ok"}
    missing = server.http.get("/v1/nothing")
    assert missing.status_code == 404
    assert "/v1/nothing" in missing.json()["error"]["message"]
    assert server.http.get("/v1/chat/completions").status_code == 405


def test_a_reader_that_leaves_frees_everything_in_every_mode(server: Server):
    for mode in MODES:
        with server.client().chat.completions.create(
            model="tiny",
            messages=asking("Tell me everything.", picture("purple")),
            max_tokens=1900,
            stream=True,
            extra_body={"epd": {"mode": mode}, "ignore_eos": True},
        ) as stream:
            for _, chunk in zip(range(3), stream, strict=False):
                assert chunk.choices
        server.assert_nothing_is_held()
    assert server.total("epd_requests_total", status="499") >= len(MODES)


def test_a_client_that_leaves_before_the_reply_frees_everything(server: Server):
    body = {"model": "tiny", "messages": asking("Tell me.", picture("blue")), "max_tokens": 1900, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/chat/completions", json=body, timeout=0.5)
    server.assert_nothing_is_held()
