"""Checks of what serving needs on this machine. Each one tries the thing itself; none changes anything."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from deployments.checks_before_start import check_before_start
from deployments.serve_file import DEFAULT_PORT, read_serve_file
from epd.errors import ConfigError

DISTRIBUTION = "ray-epd"
MIN_SHARED_MEMORY_BYTES = 1 << 30
MIN_DISK_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. A warning is something that works, but not well."""

    name: str
    status: Literal["ok", "warning", "failed"]
    detail: str


def run_checks(config: Path | None = None) -> list[Check]:
    """Run all checks; those of a ``serve run`` file too if one is given."""
    checks = [_python(), *_packages(), _cpus(), _compiler(), _nixl(), _shared_memory(), _disk(), _gpus()]
    port = DEFAULT_PORT
    if config is not None:
        finding, port = _config(config)
        checks.append(finding)
    return [*checks, _port(port)]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok" if sys.version_info >= (3, 11) else "failed", f"{version} (3.11 or later is needed)")


def _packages() -> Iterator[Check]:
    """Compare what is installed with what this distribution asks for."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield Check(DISTRIBUTION, "failed", "is not installed: run `make install` or `pip install .`")
        return
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(requirement.name, "failed", f"is not installed ({requirement.specifier} is needed)")
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        yield Check(requirement.name, "ok" if fits else "failed", f"{version} ({requirement.specifier} is needed)")


def _cpus() -> Check:
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("cpus", "ok" if num_cpus >= 2 else "warning", f"{num_cpus} usable")


def _compiler() -> Check:
    from epd.engine.native import has_compiler

    if has_compiler():
        return Check("C++ compiler", "ok", "decode attention on the CPU gets its own kernel")
    return Check(
        "C++ compiler", "warning", "none: decode attention on the CPU runs on torch's kernels, slower; apt install g++"
    )


def _nixl() -> Check:
    from epd.transfer.factory import resolve_backend

    try:
        resolve_backend("nixl")
    except ConfigError as error:
        return Check("nixl", "warning", f"{error.args[1]}; transfers go through the object store")
    return Check("nixl", "ok", "an agent could be created")


def _shared_memory() -> Check:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Check("shared memory", "warning", "there is no /dev/shm; Ray uses files instead")
    free = shutil.disk_usage(path).free
    status: Literal["ok", "warning"] = "ok" if free >= MIN_SHARED_MEMORY_BYTES else "warning"
    return Check("shared memory", status, f"{free / 2**30:.1f} GiB free in /dev/shm")


def _disk() -> Check:
    path = os.environ.get("TMPDIR", "/tmp")
    free = shutil.disk_usage(path).free
    return Check("disk", "ok" if free >= MIN_DISK_BYTES else "warning", f"{free / 2**30:.1f} GiB free in {path}")


def _gpus() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("gpu", "ok", f"none visible to torch {torch.__version__}; models run on the CPU")
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Check("gpu", "ok", names)


def _config(path: Path) -> tuple[Check, int]:
    try:
        file = read_serve_file(path)
        backend = check_before_start(file.config)
    except ConfigError as error:
        return Check("configuration", "failed", f"{path}: {error.message}"), DEFAULT_PORT
    modes = ", ".join(mode.value for mode in file.config.modes)
    return Check("configuration", "ok", f"{path}: modes {modes}; transfers over {backend}"), file.port


def _port(port: int) -> Check:
    def bind() -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))

    return _tried(f"port {port}", bind, "free", "warning")


def _tried(name: str, attempt: Callable[[], None], success: str, otherwise: Literal["warning", "failed"]) -> Check:
    try:
        attempt()
    except OSError as error:
        return Check(name, otherwise, str(error))
    return Check(name, "ok", success)
