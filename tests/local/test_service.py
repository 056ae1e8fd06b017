"""What an HTTP client gets for what the stages do. If these fail, errors reach clients as the wrong status or after the
first byte, or a request that ended badly keeps counting as running.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from epd.errors import (
    AdmissionRejectedError,
    DeadlineExceededError,
    EpdError,
    MediaFetchError,
    RequestReturnedError,
    StageFailedError,
)
from epd.testing import UNDECODABLE, FakeStageWorker
from epd.types import Prefilled, Prompt, Request, TokenChunk
from tests.cluster.scenes import asking, picture
from tests.local.in_process_service import InProcessService, in_process_service


def failing(stage: str, error: Exception, *, after_tokens: int = 0) -> Callable[..., FakeStageWorker]:
    """Return a worker type whose stage fails."""

    class FailingWorker(FakeStageWorker):
        async def prefill(self, request: Request, prompt: Prompt, payloads: Mapping[int, bytes]) -> Prefilled:
            if stage == "prefill":
                raise error
            return await super().prefill(request, prompt, payloads)

        async def decode(
            self, request: Request, source: Prompt | Prefilled, payloads: Mapping[int, bytes]
        ) -> AsyncGenerator[tuple[TokenChunk, ...]]:
            num_tokens = 0
            async with contextlib.aclosing(super().decode(request, source, payloads)) as stream:
                async for chunks in stream:
                    if stage == "decode" and num_tokens >= after_tokens:
                        raise error
                    num_tokens += 1
                    yield chunks

    return FailingWorker


def events(reply: httpx.Response) -> list[Any]:
    """Return the events of a stream, parsed; the end mark as it is."""
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


FAILURES: dict[str, tuple[Exception, int, str]] = {
    "queue full": (AdmissionRejectedError("full", "queue_full", 3.2), 429, "queue_full"),
    "stage failed": (StageFailedError("prefill", "died"), 503, "stage_failed"),
    "deadline": (DeadlineExceededError("too late"), 504, "deadline_exceeded"),
    "fetch": (MediaFetchError("no answer", "messages[0]", 2.0), 502, "media_fetch_failed"),
    "bug": (RuntimeError("secret detail"), 500, "internal_error"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", list(FAILURES))
async def test_a_failure_before_the_first_token_is_a_plain_error_reply(tiny_qwen_dir: Path, name: str, stream: bool):
    error, status, code = FAILURES[name]
    async with in_process_service(tiny_qwen_dir, worker_type=failing("prefill", error)) as service:
        reply = await service.ask(epd={"mode": "epd"}, stream=stream)
        assert reply.status_code == status
        assert reply.json()["error"]["code"] == code
        assert "secret" not in reply.text
        if status in (429, 502, 503):
            assert int(reply.headers["retry-after"]) >= 1
        assert f'status="{status}"}} 1.0' in service.page()
        assert 'epd_ingress_running_requests{replica="ingress#0"} 0.0' in service.page()
        await service.check_integrity()


async def test_a_failure_amid_a_stream_is_an_error_event_without_an_end_mark(tiny_qwen_dir: Path):
    worker = failing("decode", DeadlineExceededError("too late"), after_tokens=2)
    async with in_process_service(tiny_qwen_dir, worker_type=worker) as service:
        received = events(await service.ask(stream=True))
        assert received[-1]["error"]["code"] == "deadline_exceeded"
        assert "[DONE]" not in received
        assert 'status="504"} 1.0' in service.page()
        await service.check_integrity()


@pytest.mark.parametrize(
    "error", [StageFailedError("decode", "died"), RequestReturnedError("x", "no blocks")], ids=["lost", "returned"]
)
async def test_a_stream_goes_on_elsewhere_without_a_gap_or_a_repeat(tiny_qwen_dir: Path, error: EpdError):
    once = [error]

    class LosingOnce(FakeStageWorker):
        async def decode(
            self, request: Request, source: Prompt | Prefilled, payloads: Mapping[int, bytes]
        ) -> AsyncGenerator[tuple[TokenChunk, ...]]:
            async with contextlib.aclosing(super().decode(request, source, payloads)) as stream:
                async for chunks in stream:
                    yield chunks
                    if once:
                        raise once.pop()

    async with in_process_service(tiny_qwen_dir) as service:
        undisturbed = (await service.ask()).json()
    async with in_process_service(tiny_qwen_dir, worker_type=LosingOnce) as service:
        reply = (await service.ask(epd={"trace": True})).json()
        assert reply["choices"] == undisturbed["choices"]
        assert reply["usage"] == undisturbed["usage"]
        assert reply["epd"]["attempts"] == 2
        assert 'epd_resumed_requests_total{replica="ingress#0"} 1.0' in service.page()
        await service.check_integrity()


async def test_stages_run_where_the_mode_says_and_release_what_they_held(tiny_qwen_dir: Path):
    async with in_process_service(tiny_qwen_dir) as service:
        reply = await service.ask(messages=asking("?", picture()), epd={"mode": "epd", "trace": True})
        placement = reply.json()["epd"]["placement"]
        assert reply.headers["x-epd-mode"] == "epd"
        assert placement["encode"] == ["encode#0"]
        assert placement["prefill"] == "prefill#0"
        assert service.workers["encode#0"].stats().stage_requests == {"encode": 1}
        assert service.workers["prefill#0"].stats().stage_requests == {"prefill": 1}
        await service.check_integrity()


async def test_an_encoder_that_cannot_decode_an_item_fails_that_request_with_its_position(tiny_qwen_dir: Path):
    class Blind(FakeStageWorker):
        async def encode(self, request: Request, payloads: Mapping[int, bytes]) -> Any:
            return await super().encode(request, dict.fromkeys(payloads, UNDECODABLE))

    async with in_process_service(tiny_qwen_dir, worker_type=Blind) as service:
        reply = await service.ask(messages=asking("?", picture(), picture("blue")), epd={"mode": "e_pd"})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] in ("messages[0].content[0]", "messages[0].content[1]")
        await service.check_integrity()


async def test_the_trace_is_on_the_last_chunk_of_a_stream_and_on_none_unasked(tiny_qwen_dir: Path):
    async with in_process_service(tiny_qwen_dir) as service:
        *chunks, end = events(await service.ask(stream=True, epd={"trace": True}))
        assert end == "[DONE]"
        assert [("epd" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        *chunks, _ = events(await service.ask(stream=True, epd={"trace": True}, stream_options={"include_usage": True}))
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 8
        assert chunks[-1]["epd"]["mode"]
        assert not any("epd" in chunk for chunk in events(await service.ask(stream=True))[:-1])


async def test_several_prompts_are_numbered_through_and_counted_together(tiny_qwen_dir: Path):
    async with in_process_service(tiny_qwen_dir) as service:
        body = {"prompt": ["one two", "three"], "n": 2, "epd": {"trace": True}}
        whole = (await service.ask("/v1/completions", **body)).json()
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        assert whole["choices"][0]["text"] == whole["choices"][1]["text"] != whole["choices"][2]["text"]
        assert whole["usage"]["completion_tokens"] == 32
        assert len(whole["epd"]) == 2
        texts = dict.fromkeys(range(4), "")
        for chunk in events(await service.ask("/v1/completions", stream=True, **body))[:-1]:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert list(texts.values()) == [choice["text"] for choice in whole["choices"]]
        await service.check_integrity()


async def test_the_failure_of_one_prompt_ends_the_others(tiny_qwen_dir: Path):
    numbers = itertools.count()

    class FirstFails(FakeStageWorker):
        async def decode(
            self, request: Request, source: Prompt | Prefilled, payloads: Mapping[int, bytes]
        ) -> AsyncGenerator[tuple[TokenChunk, ...]]:
            is_first = next(numbers) == 0
            async with contextlib.aclosing(super().decode(request, source, payloads)) as stream:
                async for chunks in stream:
                    yield chunks
                    if is_first:
                        raise DeadlineExceededError("too late")

    async with in_process_service(tiny_qwen_dir, worker_type=FirstFails) as service:
        reply = await service.ask("/v1/completions", prompt=["one", "two", "three", "four"], max_tokens=200)
        assert reply.status_code == 504
        await service.check_integrity()


async def test_cancelling_the_request_frees_all_stages_and_counts_as_a_client_that_left(tiny_qwen_dir: Path):
    started = asyncio.Event()

    class Endless(FakeStageWorker):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, pause=self._wait_for_ever)

        async def _wait_for_ever(self) -> None:
            started.set()
            await asyncio.Event().wait()

    async with in_process_service(tiny_qwen_dir, worker_type=Endless) as service:
        asking_task = asyncio.create_task(service.ask(messages=asking("?", picture()), epd={"mode": "epd"}))
        await started.wait()
        assert sum(worker.load().num_running for worker in service.workers.values()) == 1
        asking_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking_task
        await service.check_integrity()
        assert 'mode="epd",replica="ingress#0",status="499"} 1.0' in service.page()


async def test_keys_are_asked_for_when_configured(tiny_qwen_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KEYS", "alpha, beta")
    async with in_process_service(tiny_qwen_dir, ingress={"api_keys_env": "KEYS"}) as service:
        assert (await service.ask()).status_code == 401
        service.http.headers["authorization"] = "Bearer gamma"
        refused = await service.ask()
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert (await service.http.get("/v1/models")).status_code == 401
        service.http.headers["authorization"] = "Bearer beta"
        assert (await service.ask()).status_code == 200
        assert (await service.http.get("/v1/models")).json()["data"][0]["id"] == "tiny"


async def test_without_keys_a_request_from_another_machine_is_refused(tiny_qwen_dir: Path):
    async with in_process_service(tiny_qwen_dir) as service:
        service.http.base_url = "http://10.1.2.3:8000"
        refused = await service.ask()
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "forbidden"
        assert (await service.http.get("/v1/models")).status_code == 403
    async with in_process_service(tiny_qwen_dir, ingress={"allow_anonymous": True}) as service:
        service.http.base_url = "http://10.1.2.3:8000"
        assert (await service.ask()).status_code == 200


async def test_a_body_is_counted_while_it_arrives(tiny_qwen_dir: Path):
    async def parts() -> AsyncGenerator[bytes]:
        for _ in range(5):
            yield b" " * 1000

    async with in_process_service(tiny_qwen_dir, ingress={"max_body_bytes": 3000}) as service:
        reply = await service.http.post("/v1/chat/completions", content=parts())
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "request_too_large"


async def test_the_body_wins_over_the_header_and_modes_that_pools_cannot_form_are_named(tiny_qwen_dir: Path):
    pools = {"all": {"roles": ["encode", "prefill", "decode"]}}
    async with in_process_service(tiny_qwen_dir, pools=pools) as service:
        service.http.headers["x-epd-mode"] = "epd"
        refused = await service.ask()
        assert refused.status_code == 400
        assert "aggregated" in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "x-epd-mode"
        assert (await service.ask(epd={"mode": "aggregated"})).status_code == 200


async def test_replicas_that_were_lost_are_looked_for_before_a_request_is_refused(tiny_qwen_dir: Path):
    async with in_process_service(tiny_qwen_dir) as service:
        for replica_id in list(service.workers):
            service.view.drop(replica_id)
        assert (await service.ask()).status_code == 200
        service.workers.clear()
        for load in service.view.loads:
            service.view.drop(load.replica_id)
        assert (await service.ask()).status_code == 503


async def test_greedy_and_seeded_requests_repeat_and_unseeded_ones_get_a_seed(tiny_qwen_dir: Path):
    seeds: list[int] = []

    class Recording(FakeStageWorker):
        async def decode(
            self, request: Request, source: Prompt | Prefilled, payloads: Mapping[int, bytes]
        ) -> AsyncGenerator[tuple[TokenChunk, ...]]:
            seeds.append(request.sampling.seed)
            async with contextlib.aclosing(super().decode(request, source, payloads)) as stream:
                async for chunks in stream:
                    yield chunks

    async with in_process_service(tiny_qwen_dir, worker_type=Recording) as service:
        for seed in (7, 7, None, None):
            await service.ask(seed=seed, epd={"mode": "aggregated"})
    assert seeds[:2] == [7, 7]
    assert len(set(seeds)) == 3


@pytest.fixture
async def service(tiny_qwen_dir: Path) -> AsyncGenerator[InProcessService]:
    async with in_process_service(tiny_qwen_dir) as service:
        yield service


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "n": ({"n": 0}, "n"),
    "temperature": ({"temperature": 3}, "temperature"),
    "stop": ({"stop": [5]}, "stop[0]"),
    "seed": ({"seed": "x"}, "seed"),
    "logit_bias token": ({"logit_bias": {"999999": 1}}, "logit_bias"),
    "logit_bias value": ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    "stop token": ({"stop_token_ids": [-1]}, "stop_token_ids"),
    "tools": ({"tools": [{"type": "function"}]}, "tools"),
    "response_format": ({"response_format": {"type": "json_object"}}, "response_format"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "role": ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    "epd not an object": ({"epd": "epd"}, "epd"),
    "unknown epd field": ({"epd": {"modes": "epd"}}, "epd.modes"),
    "slo": ({"epd": {"slo": {"ttft_s": -1}}}, "epd.slo.ttft_s"),
}


@pytest.mark.parametrize("name", list(INVALID))
async def test_invalid_fields_are_named(service: InProcessService, name: str):
    body, param = INVALID[name]
    reply = await service.ask(**body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert param in error["message"]


async def test_unknown_top_level_fields_and_nulls_are_ignored(service: InProcessService):
    reply = await service.ask(some_vendor_option=1, stop=None, temperature=None, store=False, tools=[])
    assert reply.status_code == 200


async def test_a_prompt_that_leaves_no_room_for_output_is_refused_with_the_numbers(service: InProcessService):
    refused = await service.ask(max_tokens=2047)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "2047" in refused.json()["error"]["message"]
    assert "2048" in refused.json()["error"]["message"]
    unlimited = await service.ask(max_tokens=None, stop=["never"])
    usage = unlimited.json()["usage"]
    assert usage["total_tokens"] == 2048
