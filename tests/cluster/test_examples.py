"""The examples against a running quickstart. If these fail, the first thing that a new user runs prints something else
than it says it would, or reports success for a wrong answer.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, Server, configured, free_port, running

EXAMPLES = ["image_question", "multi_image_question", "streaming", "mode_toggle"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(configured("quickstart.yaml")) as server:
        yield server
        server.assert_nothing_is_held()


def run_example(name: str, base_url: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--base-url", base_url],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
    )


def promised_output(name: str) -> list[str]:
    """Return the last indented block of the example's docstring: what it says that it prints."""
    docstring = ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text()))
    assert docstring is not None
    blocks = re.findall(r"(?:^ {4}.*\n)+", docstring, re.MULTILINE)
    return [line.removeprefix("    ") for line in blocks[-1].splitlines()]


def without_what_varies(lines: list[str]) -> list[str]:
    """Blank out replica ids, times and counts of pieces, and where and how `auto` ran."""
    steady = []
    for line in lines:
        line = re.sub(r"#\w+", "#", line)
        line = re.sub(r"\d+(\.\d+)? (ms|s|pieces)\b", r"N \2", line)
        line = re.sub(r"^auto .* N ms", "auto N ms", line)
        steady.append(" ".join(line.split()))
    return steady


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_its_docstring_promises(server: Server, name: str, tmp_path: Path):
    ran = run_example(name, f"{server.url}/v1", tmp_path)
    assert without_what_varies(ran.stdout.splitlines()) == without_what_varies(promised_output(name)), ran.stderr
    assert ran.returncode == 0
    assert ran.stderr == ""


def test_the_mode_toggle_shows_three_replicas_in_epd_and_one_in_aggregated(server: Server, tmp_path: Path):
    rows = run_example("mode_toggle", f"{server.url}/v1", tmp_path).stdout.splitlines()
    replicas = {row.split()[0]: set(row.split()[2:5]) for row in rows[1:]}
    assert {mode: len(found) for mode, found in replicas.items() if mode != "auto"} == {
        "aggregated": 1,
        "e_pd": 2,
        "ep_d": 2,
        "epd": 3,
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_without_a_server_says_so_and_fails(name: str, tmp_path: Path):
    ran = run_example(name, f"http://127.0.0.1:{free_port()}/v1", tmp_path)
    assert ran.returncode == 1
    assert "nothing answers" in ran.stderr
    assert "Traceback" not in ran.stderr
