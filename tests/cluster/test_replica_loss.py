"""A replica that is killed costs its requests time at most, and the server nothing.

If this fails, one crash in a pool takes down streams, leaks memory on the survivors, or leaves requests hanging.
"""

from __future__ import annotations

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
        refused = 0
        for seed, answer in enumerate(running):
            try:
                assert answer.result(timeout=120) == expected[seed]
            except openai.InternalServerError as error:
                assert error.status_code == 503, error
                refused += 1
    assert refused <= 1
    server.settles(lambda: replaced(server, pool, pid), "the dead replica is replaced")
    assert whole(server, "epd", 1) == expected[1]
    server.assert_nothing_is_held()


def test_a_stream_goes_on_after_its_decode_replica_was_killed(server: Server):
    request = options("epd", 3, 1500)
    undisturbed = server.client().chat.completions.create(**request).choices[0].message.content
    stream = server.client().chat.completions.create(stream=True, **request)
    text, trace, is_killed = "", None, False
    pids = {pid for _ in range(1) for pid in [server.pid_of("decode")]}
    for chunk in stream:
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        trace = (chunk.model_extra or {}).get("epd") or trace
        if not is_killed and len(text) > 40:
            is_killed = True
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
    assert text == undisturbed
    assert trace is not None
    server.settles(lambda: all(replaced(server, "decode", pid) for pid in pids), "the dead replica is replaced")
    server.assert_nothing_is_held()
