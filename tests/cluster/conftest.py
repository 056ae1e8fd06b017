"""A real local Ray with the real application on it, reached over HTTP like any server.

One cluster per test module: starting one takes seconds, so a module holds what can share it. The server runs in a
process of its own, as for a user, and everything that it started is gone afterwards.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300.0
SETTLE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the metrics page."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(slots=True)
class Server:
    """A running deployment, and how tests look at it."""

    url: str
    model: str
    process: subprocess.Popen[bytes]
    directory: Path
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=120.0, trust_env=False)

    @property
    def log(self) -> str:
        return (self.directory / "serve.log").read_text(errors="replace")

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120.0, **options)

    def metrics(self, name: str, **labels: str) -> list[Sample]:
        """Return the samples of a name whose labels include the given ones."""
        page = self.http.get("/metrics").text
        found = []
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    found.append(Sample(sample.name, sample.labels, sample.value))
        return found

    def total(self, name: str, **labels: str) -> float:
        return sum(sample.value for sample in self.metrics(name, **labels))

    def pid_of(self, pool: str) -> int:
        """Return the process of a replica of a pool."""
        title = f"ServeReplica:epd:{pool}".encode()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                pid = int(path.parent.name)
                if title in path.read_bytes() and os.getsid(pid) in self.sessions:
                    return pid
        raise AssertionError(f"no replica of {pool} runs")

    @property
    def sessions(self) -> set[int]:
        """The sessions of this server's processes, since other tests may run clusters beside it."""
        return {os.getsid(pid) for pid in descendants(self.process.pid)} | {self.process.pid}

    def settles(self, is_settled: Callable[[], bool], what: str) -> None:
        """Wait until something becomes true that happens on its own, in another process."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while not is_settled():
            assert time.monotonic() < deadline_s, f"{what}: not within {SETTLE_TIMEOUT_S} s"
            time.sleep(0.1)

    def assert_nothing_is_held(self) -> None:
        """No request runs, no handle lives, and all blocks are free again, on every replica."""

        def is_idle() -> bool:
            held = self.total("epd_running_requests") + self.total("epd_ingress_running_requests")
            held += self.total("epd_queue_requests") + self.total("epd_handles_live")
            blocks = self.total("epd_kv_blocks_total")
            return held == 0 and blocks > 0 and self.total("epd_kv_blocks_free") == blocks

        self.settles(is_idle, "everything is given back")


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def configured(name: str, **changes: Any) -> dict[str, Any]:
    """Return a shipped configuration as data, with sections of its ``args`` updated."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "configs" / name).read_text())
    args = document["applications"][0]["args"]
    for section, values in changes.items():
        args[section] = {**args.get(section, {}), **values}
    return document


@contextlib.contextmanager
def running(document: dict[str, Any]) -> Iterator[Server]:
    """Run ``serve run`` on a configuration in a cluster of its own until the block ends."""
    port = free_port()
    document["http_options"] = {"host": "127.0.0.1", "port": port}
    directory = Path(tempfile.mkdtemp(prefix="epdt-"))
    (directory / "config.yaml").write_text(yaml.safe_dump(document))
    environment = {
        **os.environ,
        "RAY_ADDRESS": "local",
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
    }
    with (directory / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.serve.scripts", "run", str(directory / "config.yaml")],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    model = document["applications"][0]["args"]["model"].get("name", "demo")
    server = Server(f"http://127.0.0.1:{port}", model, process, directory)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        _stop(server)


def _wait_until_ready(server: Server) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if server.http.get("/health").status_code == 200:
                return
        if server.process.poll() is not None or time.monotonic() > deadline_s:
            pytest.fail(f"the server did not start:\n{server.log[-8000:]}")
        time.sleep(0.25)


def _stop(server: Server) -> None:
    server.http.close()
    started = descendants(server.process.pid)
    server.process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(60.0)
    for pid in [server.process.pid, *started]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    server.process.wait()
    shutil.rmtree(server.directory, ignore_errors=True)
