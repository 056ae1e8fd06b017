"""Replicas that die under load. If these fail, one crash takes requests down with it that could have been saved, or
leaves memory of other replicas held for ever.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cluster.conftest import Server, configured, running
from tests.cluster.scenes import asking, picture

pytestmark = pytest.mark.slow  # its cheaper sibling is test_replica_loss.py

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def server(tiny_qwen_dir: Path) -> Iterator[Server]:
    document = configured("quickstart.yaml", model={"source": str(tiny_qwen_dir), "name": "tiny"})
    with running(document) as server:
        yield server


@pytest.fixture(autouse=True)
def whole_again(server: Server) -> Iterator[None]:
    """After each test every pool is back, the server answers, and nothing is held."""
    yield
    replicas = {"encode": 1, "prefill": 1, "decode": 1}

    def is_whole() -> bool:
        found = [sample.labels["pool"] for sample in server.metrics("epd_kv_blocks_total")]
        return all(found.count(pool) == count for pool, count in replicas.items())

    server.settles(is_whole, "the replacement answers")
    server.assert_nothing_is_held()
    assert answer(server, "epd")


def answer(server: Server, mode: str, **options: Any) -> str:
    reply = server.client().chat.completions.create(
        model="tiny",
        messages=asking("Which?", picture("red")),
        extra_body={"epd": {"mode": mode}},
        **{**GREEDY, **options},
    )
    content: str = reply.choices[0].message.content
    return content


def kill(server: Server, pool: str) -> None:
    os.kill(server.pid_of(pool), signal.SIGKILL)


def test_a_killed_prefill_replica_costs_at_most_an_honest_error(server: Server):
    """With no other replica for the asked mode a request may fail, but fast, as 503; any other is placed elsewhere."""
    expected = answer(server, "aggregated")
    stop = threading.Event()
    outcomes: list[str] = []
    refusals: list[tuple[str, int, str | None]] = []

    def ask(mode: str) -> None:
        while not stop.is_set():
            try:
                outcomes.append(answer(server, mode))
            except openai.APIStatusError as error:
                refusals.append((mode, error.status_code, error.response.headers.get("retry-after")))

    with ThreadPoolExecutor() as threads:
        asking_on = [threads.submit(ask, mode) for mode in ("auto", "epd", "aggregated")]
        server.settles(lambda: len(outcomes) > 6, "requests are answered")
        kill(server, "prefill")
        before = len(outcomes)
        server.settles(lambda: len(outcomes) > before + 20, "requests are answered after the loss")
        stop.set()
        for each in asking_on:
            each.result()
    assert set(outcomes) == {expected}
    assert set(refusals) <= {("epd", 503, "1")}
