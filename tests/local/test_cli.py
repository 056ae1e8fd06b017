"""The ``epd`` command before anything is served. If these fail, a mistake in a file or a taken port shows up as a pile
of Ray's tracebacks, minutes later.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from deployments.cli import app
from deployments.first_steps import BEGIN_PYTHON, END_PYTHON, first_steps
from deployments.local_server import _members
from deployments.serve_file import ServeFile
from epd.config import parse_config

ALL = {"all": {"roles": ["encode", "prefill", "decode"]}}


@pytest.fixture
def serve_file(tmp_path: Path, tiny_qwen_dir: Path) -> Path:
    args = {"model": {"source": str(tiny_qwen_dir)}, "pools": ALL, "transfer": {"backend": "object_store"}}
    document = {"applications": [{"import_path": "deployments.app:build_app", "args": args}]}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.mark.parametrize("command", ["serve", "doctor", "bench", "profile"])
def test_each_command_has_help_with_an_example(command: str):
    code, output = run(command, "--help")
    assert code == 0
    assert "Example" in output


def test_serve_refuses_a_bad_file_by_its_yaml_path(serve_file: Path):
    document = yaml.safe_load(serve_file.read_text())
    document["applications"][0]["args"]["engine"] = {"blocksize": 16}
    serve_file.write_text(yaml.safe_dump(document))
    code, output = run("serve", str(serve_file))
    assert code == 2
    assert "args.engine.blocksize: unknown key" in output


def test_serve_says_that_the_port_is_taken(serve_file: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = run("serve", str(serve_file), "--port", str(port))
    assert code == 2
    assert f"127.0.0.1:{port}" in output


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("10.1.2.3", "http://10.1.2.3:8000"),
    ],
)
def test_the_address_shown_is_one_that_this_machine_can_call(host: str, url: str):
    assert ServeFile({}, parse_config({"pools": ALL}), host, 8000).url == url


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc on this machine")
def test_a_process_whose_parent_died_is_still_found_to_be_stopped():
    command = ["sh", "-c", "sleep 600 >/dev/null & echo $!"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True) as parent:
        orphan = int(parent.communicate()[0])
    try:
        assert _members(parent.pid) == {orphan}
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_doctor_reports_each_check_for_machines(serve_file: Path):
    code, output = run("doctor", str(serve_file), "--json")
    checks = {check["name"]: check for check in json.loads(output)["checks"]}
    assert {"python", "C++ compiler", "nixl", "shared memory", "gpu", "configuration"} <= checks.keys()
    assert checks["configuration"]["status"] == "ok"
    assert "aggregated" in checks["configuration"]["detail"]
    assert code == int(any(check["status"] == "failed" for check in checks.values()))


def test_doctor_fails_on_a_bad_file(tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_text("applications: []")
    code, output = run("doctor", str(path), "--json")
    assert code == 1
    assert {"name": "configuration", "status": "failed"}.items() <= json.loads(output)["checks"][-2].items()


def test_the_first_steps_are_a_line_of_shell_and_valid_python():
    config = parse_config({"pools": ALL})
    text = first_steps("http://127.0.0.1:1", config)
    curl = [line for line in text.splitlines() if line.startswith("curl ")]
    assert len(curl) == 1
    assert json.loads(curl[0].partition("-d ")[2].strip("'"))["model"] == "demo"
    snippet = text.partition(BEGIN_PYTHON)[2].partition(END_PYTHON)[0]
    compile(snippet, "snippet", "exec")
    assert '"mode": "aggregated"' in snippet
