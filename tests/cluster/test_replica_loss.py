"""A replica that is killed costs its requests time at most, and the server nothing.

If this fails, one crash in a pool takes down streams, leaks memory on the survivors, or leaves requests hanging.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cluster.conftest import Server, configured, running
from tests.cluster.scenes import asking, noise


@pytest.fixture(scope="module")
def server(tiny_qwen_dir: Path) -> Iterator[Server]:
    two = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.1}}
    document = configured(
        "quickstart.yaml",
        model={"source": str(tiny_qwen_dir), "name": "tiny"},
        pools={
            "prefill": {"roles": ["encode", "prefill"], **two},
            "decode": {"roles": ["encode", "prefill", "decode"], **two},
        },
        router={"admission": False},
    )
    with running(document) as server:
        yield server


def options(mode: str, seed: int, max_tokens: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": asking("Tell me everything.", noise((112, 84), seed)),
        "temperature": 0,
        "max_tokens": max_tokens,
        "extra_body": {"epd": {"mode": mode, "trace": True}, "ignore_eos": True},
    }


def whole(server: Server, mode: str, seed: int, max_tokens: int = 60) -> str:
    return server.client().chat.completions.create(**options(mode, seed, max_tokens)).choices[0].message.content or ""


def replaced(server: Server, pool: str, pid: int) -> bool:
    """Whether the dead replica is gone from view and another has taken its place."""
    loads = {sample.labels["replica"] for sample in server.metrics("epd_running_requests", pool=pool)}
    return len(loads) == 2 and not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_requests_survive_the_loss_of_a_replica(server: Server, pool: str):
    """Kill a replica under load: each request completes with its own text, or is told 503; then the pool recovers."""
    expected = {seed: whole(server, "aggregated", seed) for seed in range(8)}
    with ThreadPoolExecutor(8) as threads:
        running: list[Future[str]] = [threads.submit(whole, server, "epd", seed) for seed in expected]
        pid = server.pid_of(pool)
        os.kill(pid, signal.SIGKILL)
        outcomes = [outcome(answer) for answer in running]
    assert all(got in (expected[seed], 503) for seed, got in enumerate(outcomes)), outcomes
    assert outcomes.count(503) <= 1
    server.settles(lambda: replaced(server, pool, pid), "the dead replica is replaced")
    assert whole(server, "epd", 1) == expected[1]
    server.assert_nothing_is_held()


def outcome(answer: Future[str]) -> str | int:
    """The text of a request, or the status that it was refused with."""
    try:
        return answer.result(timeout=120)
    except openai.APIStatusError as error:
        return error.status_code


def streamed(server: Server, seed: int) -> str:
    chunks = server.client().chat.completions.create(stream=True, **options("epd", seed, 1500))
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def busy_decode_pid(server: Server) -> int | None:
    """The process of a decode replica that decodes now, told by the log file that Serve opens for it."""
    for sample in server.metrics("epd_running_requests", pool="decode", stage="decode"):
        if sample.value:
            log = f"replica_epd_decode_{sample.labels['replica'].partition('#')[2]}"
            for link in Path("/proc").glob("[0-9]*/fd/*"):
                with contextlib.suppress(OSError):
                    if log in os.readlink(link):
                        return int(link.parts[2])
    return None


def test_streams_go_on_after_their_decode_replica_was_killed(server: Server):
    """Two clients read on, each its undisturbed text, no token lost and none twice."""
    undisturbed = [whole(server, "epd", seed, 1500) for seed in (3, 4)]
    resumed = server.total("epd_resumed_requests_total")
    with ThreadPoolExecutor(2) as threads:
        streams = [threads.submit(streamed, server, seed) for seed in (3, 4)]
        server.settles(lambda: busy_decode_pid(server) is not None, "a decode replica has a stream")
        pid = busy_decode_pid(server)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert [stream.result(timeout=120) for stream in streams] == undisturbed
    assert server.total("epd_resumed_requests_total") > resumed
    server.settles(lambda: replaced(server, "decode", pid), "the dead replica is replaced")
    server.assert_nothing_is_held()
