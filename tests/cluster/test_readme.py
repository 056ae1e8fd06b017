"""The commands of the README, run as printed. If these fail, a reader who pastes a line gets an error, or another
answer than the page says.

Blocks that talk to a server run against a quickstart on a port of its own, from a directory that looks like a checkout.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, Server, configured, running

README = (ROOT / "README.md").read_text()
NOT_RUN = {
    "make serve": "test_wheel starts a server with the same command that make runs",
    "make install": "it is how the environment of this test came to be",
    "serve run configs/gpu.yaml": "needs four GPUs; the file is validated by tests/unit/test_docs.py",
    "kubectl apply -f configs/kuberay.yaml": "needs Kubernetes; the file is validated by tests/unit/test_docs.py",
    ".venv/bin/python examples/image_question.py": "run by test_examples.py",
}
"""Blocks that no test here runs, by their first line, and why."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


RUN = [block for block in blocks("bash") if block.splitlines()[0] not in NOT_RUN]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(configured("quickstart.yaml")) as server:
        yield server
        server.assert_nothing_is_held()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A directory in which the README's relative paths lead to this checkout and this environment."""
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def run_block(block: str, checkout: Path, url: str = "") -> str:
    """Run shell lines, with the server's address in place of the one in the README; return what they print."""
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.replace("http://127.0.0.1:8000", url)],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def the_block_with(words: str) -> str:
    (found,) = (block for block in RUN if words in block)
    return found


def test_every_block_is_run_or_has_a_reason_not_to_be():
    assert set(NOT_RUN) <= {block.splitlines()[0] for block in blocks("bash")}
    tested = ("Count from 3 to 12.", "green fox seven", "epd doctor", "epd profile", "epd bench", "--help")
    assert all(any(words in block for words in tested) for block in RUN)


def test_the_first_curl_line_counts(server: Server, checkout: Path):
    reply = json.loads(run_block(the_block_with("Count from 3 to 12."), checkout, server.url))
    assert reply["choices"][0]["message"]["content"] == "3 4 5 6 7 8 9 10 11 12"
    assert "`3 4 5 6 7 8 9 10 11 12`" in README


def test_the_python_snippet_names_the_colour_and_three_replicas(server: Server, checkout: Path):
    (snippet,) = blocks("python")
    ran = subprocess.run(
        [sys.executable, "-c", snippet.replace("http://127.0.0.1:8000", server.url)],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    answer, placement = ran.stdout.splitlines()
    assert answer == "red"
    where = ast.literal_eval(placement)
    assert len({*where["encode"], where["prefill"], where["decode"]}) == 3


def test_the_header_asks_for_a_mode_and_the_trace_tells_it(server: Server, checkout: Path):
    reply = json.loads(run_block(the_block_with("green fox seven"), checkout, server.url))
    assert reply["choices"][0]["message"]["content"] == "green fox seven"
    assert reply["epd"]["mode"] == "ep_d"
    table = re.search(r"the object `epd`:\n\n(.*?)\n\n", README, re.DOTALL)
    assert table is not None
    named = [name for row in table[1].splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert named == list(reply["epd"])


def test_doctor_finds_nothing_that_fails(checkout: Path):
    assert "failed" not in run_block(the_block_with("epd doctor"), checkout)


def test_profile_writes_a_file_that_the_router_reads(server: Server, checkout: Path):
    from epd.routing import CostModel

    run_block(the_block_with("epd profile"), checkout, server.url)
    assert CostModel.from_json((checkout / "profile.json").read_text()).is_calibrated


def test_bench_compares_the_modes_that_it_is_asked_for(server: Server, checkout: Path):
    table = run_block(the_block_with("epd bench"), checkout, server.url)
    assert all(mode in table for mode in ("auto", "aggregated", "epd"))


def test_training_and_evaluation_say_how_they_are_used(checkout: Path):
    assert "usage" in run_block(the_block_with("train_demo_model.py --help"), checkout).lower()
