"""``serve run`` on this machine in a cluster of its own, from start to the last process gone.

Owns the child processes and the temporary directory. What is served is Serve's business.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
import yaml
from rich.console import Console

from deployments import environment
from deployments.checks_before_start import check_before_start
from deployments.first_steps import first_steps
from deployments.serve_file import ServeFile, read_serve_file
from epd.errors import ConfigError

STOP_TIMEOUT_S = 30.0
KILL_TIMEOUT_S = 2.0
_POLL_INTERVAL_S = 0.25
_FAILURE = re.compile(r"Deploying app .* failed|DEPLOY_FAILED|is UNHEALTHY.*constructor|Failed to (start|deploy)")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def serve_until_stopped(path: Path, *, port: int | None, timeout_s: float, verbose: bool) -> int:
    """Serve a file until SIGINT or SIGTERM; return the exit code. Blocking; call it on the main thread.

    Raises ``ConfigError`` if the file cannot work.
    """
    console = Console(stderr=True, highlight=False)
    file = read_serve_file(path)
    file = file if port is None else file.listening_on(port)
    check_before_start(file.config)
    _check_port_is_free(file)
    stop = threading.Event()
    with _stopping_on_signals(stop), _short_temporary_directory() as directory:
        server = _Server(file, directory, verbose=verbose)
        try:
            with console.status("starting"):
                problem = server.wait_until_ready(timeout_s, stop, console)
            if problem is not None:
                console.print(f"[red]error:[/red] {problem}", soft_wrap=True)
                return 1
            if not stop.is_set():
                sys.stdout.write(first_steps(file.url, file.config))
                sys.stdout.flush()
            return server.wait_until_stopped(stop, console)
        finally:
            with console.status("stopping"):
                server.stop()


@contextlib.contextmanager
def _short_temporary_directory() -> Iterator[Path]:
    """Make a directory, and remove it on leaving. Ray puts sockets below it, whose names must be short."""
    directory = Path(tempfile.mkdtemp(prefix="epd-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _Server:
    """The child process that runs ``serve run``, and everything that it started."""

    def __init__(self, file: ServeFile, directory: Path, *, verbose: bool) -> None:
        self._url = file.url
        self._log_path = directory / "serve.log"
        config_path = directory / "config.yaml"
        config_path.write_text(yaml.safe_dump(dict(file.document), sort_keys=False))
        variables = {
            **environment.CLUSTER,
            **os.environ,
            "RAY_ADDRESS": "local",
            "RAY_TMPDIR": str(directory),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        command = [sys.executable, "-m", "ray.serve.scripts", "run", str(config_path)]
        self._log: IO[bytes] | None = None if verbose else self._log_path.open("wb")
        # A session of its own: a Ctrl-C reaches this process only, which stops the others in order.
        self._process = subprocess.Popen(
            command, env=variables, stdout=self._log, stderr=self._log, start_new_session=True
        )

    def wait_until_ready(self, timeout_s: float, stop: threading.Event, console: Console) -> str | None:
        """Return ``None`` when the server answers or ``stop`` is set, else what went wrong."""
        deadline_s = time.monotonic() + timeout_s
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while not stop.is_set():
                if self._process.poll() is not None:
                    return f"the server ended with code {self._process.returncode}{self._log_tail()}"
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self._url}/health").status_code == 200:
                        return None
                if self._has_failed():
                    return f"the application cannot be deployed{self._log_tail()}"
                if time.monotonic() > deadline_s:
                    return f"the server does not answer after {timeout_s:.0f} s{self._log_tail()}"
                stop.wait(_POLL_INTERVAL_S)
        return None

    def wait_until_stopped(self, stop: threading.Event, console: Console) -> int:
        while not stop.wait(_POLL_INTERVAL_S):
            if self._process.poll() is not None:
                console.print(f"[red]error:[/red] the server ended{self._log_tail()}", soft_wrap=True)
                return 1
        return 0

    def stop(self) -> None:
        """End the server and whatever it started; return when all are gone."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        # Ray's agents outlive their raylet by half a minute, and an interrupted start leaves more.
        for kind in (signal.SIGTERM, signal.SIGKILL):
            deadline_s = time.monotonic() + KILL_TIMEOUT_S
            sent: set[int] = set()
            while (left := _members(self._process.pid)) and time.monotonic() < deadline_s:
                for pid in left - sent:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, kind)
                sent |= left
                time.sleep(0.05)
        self._process.wait()
        if self._log is not None:
            self._log.close()

    def _has_failed(self) -> bool:
        return self._log is not None and _FAILURE.search(self._log_path.read_text(errors="replace")) is not None

    def _log_tail(self) -> str:
        if self._log is None:
            return ""
        lines = _COLOR.sub("", self._log_path.read_text(errors="replace")).splitlines()
        return ":\n" + "\n".join(lines[-40:])


def _check_port_is_free(file: ServeFile) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((file.host, file.port))
        except OSError as error:
            raise ConfigError("http_options.port", f"cannot listen on {file.host}:{file.port}: {error}") from error


@contextlib.contextmanager
def _stopping_on_signals(stop: threading.Event) -> Iterator[None]:
    """Set ``stop`` on Ctrl-C, on SIGTERM, and when the terminal is closed, unless that is ignored (``nohup``)."""

    def request_stop(*_: object) -> None:
        stop.set()

    kinds = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        kinds.append(signal.SIGHUP)
    before = {kind: signal.signal(kind, request_stop) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _members(session: int) -> set[int]:
    """Return the processes of a session that run, whoever is their parent by now.

    Empty where there is no ``/proc``; Serve's own shutdown must do.
    """
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The command, in parentheses, may contain anything; state, parent, group and session come after it.
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state not in ("Z", "X"):
                found.add(int(stat.parent.name))
    return found
