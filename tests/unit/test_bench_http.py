"""If these fail, `epd bench` or `epd profile` misreads a real server: streams, errors, traces, or its own options.

The server is a small OpenAI-compatible one on loopback, which answers at once and reports stage timings by formula, so
no result depends on how fast this machine is.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from typer.testing import CliRunner

from epd.bench.cli import bench, profile
from epd.bench.client import Contender, Due, api_root, first_model, run_open_loop, send
from epd.bench.metrics import RequestTimeline
from epd.bench.profiler import Measurements, add_decode_samples, fit_cost_model
from epd.bench.runner import BenchPlan, Progress, run_bench
from epd.bench.workload import RequestShape, WorkItem, Workload, fixed_workload, request_body
from epd.errors import EpdError
from epd.routing.cost_model import CostModel, CostSource, CostStage, ProfileKey
from epd.types import SLO

MODES = {"aggregated", "e_pd", "ep_d", "epd", "auto"}
MAX_WORDS = 300


class FakeOpenAI:
    """Answers chat completions with ``max_tokens`` words; the text of the first word selects a failure."""

    def __init__(self) -> None:
        self.modes = set(MODES)
        self.bodies: list[dict[str, Any]] = []
        self.sends_trace = True
        self.cut_after: int | None = None
        self.fails_with: tuple[int, object] | None = None
        routes = [Route("/v1/chat/completions", self.chat, methods=["POST"]), Route("/v1/models", self.models)]
        self.app = Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "fake", "max_model_len": 2 * MAX_WORDS}]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        *images, text = body["messages"][0]["content"]
        mode = body.get("epd", {}).get("mode", "auto")
        num_words = len(text["text"].split())
        if self.fails_with is not None:
            status, error = self.fails_with
            return JSONResponse({"error": error}, status)
        if mode not in self.modes or num_words > MAX_WORDS:
            return JSONResponse({"error": {"message": "cannot do that"}}, 400)
        sizes = [decode_size(part) for part in images]
        headers = {"x-epd-mode": mode}
        stream = self.stream(body, mode, [w * h // 784 for w, h in sizes], num_words)
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def stream(self, body: dict[str, Any], mode: str, tokens: list[int], num_words: int) -> AsyncIterator[str]:
        num_prompt = num_words + sum(tokens) + 2 * len(tokens)
        yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        for index in range(body["max_tokens"]):
            if index == self.cut_after:
                yield event(error={"message": "decode failed"})
                return
            yield event(choices=[{"index": 0, "delta": {"content": f"w{index} "}}])
        if self.sends_trace and body.get("epd", {}).get("trace"):
            yield event(choices=[{"index": 0, "delta": {}}], epd=trace(mode, tokens, num_prompt))
        yield event(choices=[], usage={"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"]})
        yield "data: [DONE]\n\n"


def decode_size(part: dict[str, Any]) -> tuple[int, int]:
    data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    return Image.open(io.BytesIO(data)).size


def trace(mode: str, tokens: list[int], num_prompt: int) -> dict[str, Any]:
    """Stage timings that follow the cost forms exactly (milliseconds)."""
    patches = [4 * n for n in tokens]
    timings = {"prefill": 5 + 0.1 * num_prompt + 1e-5 * num_prompt**2, "kv_transfer": 2 + 1e-6 * 6144 * num_prompt}
    if tokens:
        timings["preprocess"] = 2 * len(tokens) + 0.01 * sum(patches)
        timings["encode"] = 10 + 0.05 * sum(patches) + 1e-6 * sum(n * n for n in patches)
        timings["embedding_transfer"] = 3 + 1e-6 * 1024 * sum(tokens)
    return {
        "mode": mode,
        "placement": {"encode": ["e"] * len(tokens), "prefill": "p", "decode": "d"},
        "timings_ms": timings,
        "bytes": {"embedding": 1024 * sum(tokens), "kv": 6144 * num_prompt},
        "cached": {"prefix_tokens": 0, "embedding_items": 0},
    }


def event(**fields: object) -> str:
    return f"data: {json.dumps(fields)}\n\n"


@contextlib.contextmanager
def serve(app: Starlette) -> Iterator[str]:
    """Serve an app on a free loopback port, from a thread, until the block ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", lifespan="off", ws="none", http="h11", loop="asyncio")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        listener.close()


@pytest.fixture
def fake() -> FakeOpenAI:
    return FakeOpenAI()


@pytest.fixture
def url(fake: FakeOpenAI) -> Iterator[str]:
    with serve(fake.app) as base_url:
        yield base_url


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30.0, trust_env=False) as made:
        yield made


def due(index: int = 0, due_s: float = 0.0, num_images: int = 0, output_tokens: int = 4, **options: Any) -> Due:
    item = WorkItem(index, due_s, RequestShape(num_images, 56, 56, 5, output_tokens), tuple(range(num_images)))
    return Due(index, due_s, request_body(item, model="fake", options=options))


# -- the client


async def test_a_stream_is_logged_with_tokens_usage_mode_and_trace(url: str, client: httpx.AsyncClient) -> None:
    contender = Contender("epd", url, "fake", mode="epd")
    timeline = await send(client, contender, due(num_images=1, **contender.options))
    assert timeline.is_complete
    assert len(timeline.token_at_s) == timeline.num_output_tokens == 4
    assert list(timeline.token_at_s) == sorted(timeline.token_at_s)
    assert timeline.num_prompt_tokens == 5 + 4 + 2
    assert (timeline.status, timeline.mode, timeline.text) == (200, "epd", "w0 w1 w2 w3 ")
    assert timeline.trace["bytes"]["kv"] == 6144 * 11


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_a_base_url_works_with_and_without_v1(url: str, client: httpx.AsyncClient, suffix: str) -> None:
    assert api_root(url + suffix) == url + "/v1"
    assert (await first_model(client, url + suffix))["id"] == "fake"


@pytest.mark.parametrize(
    ("fails_with", "error", "is_rejected"),
    [
        ((429, {"message": "queue full"}), "HTTP 429: queue full", True),
        ((500, "plain"), "HTTP 500: plain", False),
        ((400, {"message": "bad image"}), "HTTP 400: bad image", False),
    ],
)
async def test_an_error_answer_is_logged_not_raised(
    fake: FakeOpenAI,
    url: str,
    client: httpx.AsyncClient,
    fails_with: tuple[int, object],
    error: str,
    is_rejected: bool,
) -> None:
    fake.fails_with = fails_with
    timeline = await send(client, Contender("c", url, "fake"), due())
    assert (timeline.error, timeline.is_rejected, timeline.is_complete) == (error, is_rejected, False)


async def test_a_stream_that_breaks_off_counts_as_failed(fake: FakeOpenAI, url: str, client: httpx.AsyncClient) -> None:
    fake.cut_after = 2
    timeline = await send(client, Contender("c", url, "fake"), due())
    assert timeline.error == "decode failed"
    assert len(timeline.token_at_s) == 2
    assert not timeline.is_complete


@pytest.mark.parametrize(("ends", "is_complete"), [("finish", True), ("done", True), ("neither", False)])
async def test_a_stream_is_complete_once_it_says_why_it_ended(
    fake: FakeOpenAI, url: str, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, ends: str, is_complete: bool
) -> None:
    async def stream(*args: object) -> AsyncIterator[str]:
        yield event(choices=[{"index": 0, "delta": {"content": "w"}}])
        if ends == "finish":
            yield event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
        elif ends == "done":
            yield "data: [DONE]\n\n"

    monkeypatch.setattr(fake, "stream", stream)
    timeline = await send(client, Contender("c", url, "fake"), due())
    assert timeline.is_complete is is_complete
    assert timeline.error == ("" if is_complete else "the stream ended before its last token")


async def test_a_server_that_is_not_there_counts_as_failed(client: httpx.AsyncClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    timeline = await send(client, Contender("c", f"http://127.0.0.1:{port}", "fake"), due())
    assert timeline.status == 0
    assert timeline.error.startswith("ConnectError")


async def test_requests_are_sent_when_due_however_many_still_run(url: str, client: httpx.AsyncClient) -> None:
    """The clock stands still except while the client sleeps: each request sleeps exactly until it is due."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    requests = [due(index, due_s=0.5 * index) for index in range(4)]
    timelines = await run_open_loop(client, Contender("c", url, "fake"), requests, clock=lambda: 100.0, sleep=sleep)
    assert sorted(slept) == [0.5, 1.0, 1.5]
    assert [timeline.index for timeline in timelines] == [0, 1, 2, 3]
    assert [timeline.due_at_s for timeline in timelines] == [100.0, 100.5, 101.0, 101.5]


# -- the runner


async def test_contenders_alternate_and_get_equal_work_that_shares_no_cache(
    fake: FakeOpenAI, url: str, client: httpx.AsyncClient
) -> None:
    def workload_of(rate: float, seed: int) -> Workload:
        shape = RequestShape(1, 56, 56, 5, 3)
        return fixed_workload([shape], rate=rate, duration_s=0.04, cv=0, seed=seed, image_share=1.0)

    contenders = tuple(Contender(mode, url, "fake", mode=mode) for mode in ("auto", "epd"))
    plan = BenchPlan(contenders, workload_of, SLO(60.0, 60.0), (100.0,), num_rounds=2, num_warmup=1)
    seen: list[Progress] = []
    result = await run_bench(client, plan, seen.append)
    asked = [body["epd"]["mode"] for body in fake.bodies[2:]]
    assert asked == ["auto"] * 3 + ["epd"] * 6 + ["auto"] * 3
    images = [body["messages"][0]["content"][0]["image_url"]["url"] for body in fake.bodies]
    assert len(set(images)) == len(images)
    assert [(each.contender, each.num_offered, each.attainment) for each in result.summaries] == [
        ("auto", 6, 1.0),
        ("epd", 6, 1.0),
    ]
    assert result.summaries[1].modes == {"epd": 6}
    assert seen[-1].num_done == seen[-1].num_total == 3


async def test_a_contender_that_fails_its_warm_up_stops_the_run(
    fake: FakeOpenAI, url: str, client: httpx.AsyncClient
) -> None:
    fake.modes = {"auto"}

    def workload_of(rate: float, seed: int) -> Workload:
        return fixed_workload([RequestShape(0, 56, 56, 5, 3)], rate=rate, duration_s=0.1, cv=0, seed=seed)

    plan = BenchPlan((Contender("epd", url, "fake", mode="epd"),), workload_of, SLO(1, 1), (50.0,))
    with pytest.raises(EpdError, match=r"epd at .* failed its warm-up: HTTP 400: cannot do that"):
        await run_bench(client, plan)


# -- the commands


def invoke(command: Any, *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_bench_prints_one_json_document_on_stdout_and_writes_the_same(url: str, tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    result = invoke(
        bench, "--url", url, "--mode", "auto", "--mode", "epd", "--peer", f"other={url}", "--rate", "40", "--duration",
        "0.2", "--cv", "0", "--image-size", "56x56", "--output-tokens", "3", "--slo-ttft", "60", "--slo-itl", "60",
        "--output", str(report_path), "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [each["contender"] for each in report["summaries"]] == ["auto", "epd", "other"]
    assert all(each["attainment"] == 1.0 for each in report["summaries"])
    assert json.loads(report_path.read_text()) == report


def test_mode_none_sends_no_extension_that_another_server_might_refuse(fake: FakeOpenAI, url: str) -> None:
    arguments = ["--url", url, "--mode", "none", "--rate", "20", "--duration", "0.1", "--cv", "0", "--json"]
    assert invoke(bench, *arguments).exit_code == 0
    assert fake.bodies
    assert not any("epd" in body for body in fake.bodies)


def test_max_goodput_is_searched_for_each_contender_when_asked_for(url: str) -> None:
    arguments = ["--rate", "10", "--duration", "0.2", "--cv", "0", "--images", "0", "--output-tokens", "2", "--warmup"]
    arguments += ["0", "--slo-ttft", "1e-9", "--max-goodput", "--json"]
    result = invoke(bench, "--url", url, *arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["max_goodput"]["auto"]
    assert found["rate"] == 0.0
    assert [rate for rate, _ in found["tried"]][:3] == [10.0, 5.0, 2.5]


def test_bench_prints_a_table_with_failures_and_their_reason(fake: FakeOpenAI, url: str) -> None:
    fake.fails_with = (500, {"message": "boom"})
    result = invoke(bench, "--url", url, "--rate", "20", "--duration", "0.2", "--cv", "0", "--warmup", "0")
    assert result.exit_code == 0, result.output
    assert "goodput" in result.stdout
    assert "3 x auto: HTTP 500: boom" in result.stdout


@pytest.mark.parametrize("command", [bench, profile])
def test_help_shows_an_example(command: Any) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"Example: epd {command.__name__}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image-size", "448"], "'448' is not WIDTHxHEIGHT"),
        (["--peer", "http://x"], "is not NAME=URL"),
        (["--workload", "/nowhere"], "'/nowhere' is not fixed, builtin or a directory"),
        (["--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
    ],
)
def test_a_wrong_option_is_one_line_on_stderr(arguments: list[str], message: str) -> None:
    result = invoke(bench, *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_profile_recovers_the_costs_of_the_server_and_writes_a_file_that_the_router_reads(
    fake: FakeOpenAI, url: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    result = invoke(
        profile, "--url", url, "--output", str(path), "--points", "12", "--max-batch", "2", "--max-image-side", "280",
        "--dtype", "bfloat16", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    model = CostModel.from_json(path.read_text())
    assert model.source is CostSource.PROFILE
    assert (model.key.model, model.key.dtype) == ("fake", "bfloat16")
    # Sizes are whole tokens of 28 x 28 pixels on the server's side, so this is exact up to rounding in the JSON.
    assert model.encode_s([400, 400]) == pytest.approx(0.010 + 0.04 + 0.32e-3, rel=1e-6)
    assert model.preprocess_s([400]) == pytest.approx(0.002 + 0.004, rel=1e-6)
    assert model.prefill_s(200) == pytest.approx(0.005 + 0.02 + 0.4e-3, rel=1e-6)
    assert model.embedding_transfer_s(100) == pytest.approx(0.003 + 1024e-7, rel=1e-6)
    assert model.kv_transfer_s(100) == pytest.approx(0.002 + 6144e-7, rel=1e-6)
    assert (model.embedding_bytes_per_token, model.kv_bytes_per_token) == (1024, 6144)
    assert printed["hold_out_error"]["encode"] < 1e-6
    assert printed["num_samples"]["prefill"] == 12
    decode_prompts = [json.dumps(body["messages"]) for body in fake.bodies if body["max_tokens"] == 33]
    assert len(set(decode_prompts)) == len(decode_prompts) == (1 + 2) * 2


def test_profile_takes_the_modes_that_the_pools_can_form(fake: FakeOpenAI, url: str, tmp_path: Path) -> None:
    fake.modes = {"e_pd"}
    path = tmp_path / "profile.json"
    result = invoke(profile, "--url", url, "--output", str(path), "--points", "8", "--max-batch", "1")
    assert result.exit_code == 0, result.output
    assert "hold-out error" in result.stdout
    assert fake.bodies[-1]["epd"]["mode"] == "e_pd"


def test_a_server_without_traces_cannot_be_profiled(fake: FakeOpenAI, url: str, tmp_path: Path) -> None:
    fake.sends_trace = False
    result = invoke(profile, "--url", url, "--output", str(tmp_path / "profile.json"))
    assert result.exit_code == 1
    assert "sends no epd trace" in result.stderr
    assert not (tmp_path / "profile.json").exists()


# -- decode steps


def stream_log(start_s: float, step_s: float, num_tokens: int, decode: str = "d", chunk: int = 1) -> RequestTimeline:
    times = tuple(start_s + step_s * index for index in range(0, num_tokens, chunk))
    placement = {"placement": {"decode": decode}}
    return RequestTimeline(0, "c", 0.0, 0.0, 99.0, times, 100, num_tokens, 200, trace=placement)


def test_decode_steps_count_only_while_all_streams_of_a_replica_decode() -> None:
    """The second stream starts late; before that the first one steps four times as fast."""
    early = [0.01 * index for index in range(100)]
    late = [1.0 + 0.04 * index for index in range(80)]
    first = RequestTimeline(0, "c", 0, 0, 99, tuple(early + late), 100, 180, 200, trace={"placement": {"decode": "d"}})
    result = Measurements()
    add_decode_samples(result, [first, stream_log(1.0, 0.04, 80), stream_log(0.0, 0.02, 50, decode="other")])
    by_batch = {2: [], 1: []}
    for sample in result.samples[CostStage.DECODE]:
        by_batch[sample.terms[2]].append(sample)
    assert [sample.seconds for sample in by_batch[2]] == pytest.approx([0.04] * 4)
    assert [sample.seconds for sample in by_batch[1]] == pytest.approx([0.02] * 4)
    context = [sample.terms[1] for sample in by_batch[2]]
    assert context == sorted(context)
    assert context[0] == pytest.approx(100 + 100 + 100 + 10 + 10, abs=3)


def test_a_chunk_of_several_tokens_is_several_steps() -> None:
    result = Measurements()
    add_decode_samples(result, [stream_log(0.0, 0.02, 64, chunk=4)])
    assert [sample.seconds for sample in result.samples[CostStage.DECODE]] == pytest.approx([0.02] * 4)


def test_a_deployment_that_never_encoded_cannot_be_fitted() -> None:
    result = Measurements()
    add_decode_samples(result, [stream_log(0.0, 0.02, 64)])
    with pytest.raises(EpdError, match="cannot fit"):
        fit_cost_model(result, ProfileKey("m", "cpu", "float32", "0"))
