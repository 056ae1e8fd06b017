"""Compiles the C++ kernels on first use, keeps the result in a cache directory, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_LOG = logging.getLogger(__name__)
_SOURCE_DIR = Path(__file__).parent
_COMPILE = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp", "-fPIC", "-std=c++17")
_BUILD_TIMEOUT_S = 240.0


def has_compiler() -> bool:
    return _compiler() is not None


@cache
def load_library() -> ctypes.CDLL | None:
    """Return the kernels' library, built if need be; ``None``, with a log line that says why, where it cannot be."""
    compiler = _compiler()
    if compiler is None:
        _LOG.info("no C++ compiler: the engine runs on torch's kernels, at a fraction of the speed")
        return None
    try:
        # torch's OpenMP runtime is loaded globally, and the library binds to it: one pool of threads in the process.
        return ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        _LOG.warning("the engine's kernels could not be built, torch's kernels run instead: %s", detail)
        return None


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def _build(compiler: str) -> Path:
    """Compile into the cache, unless it is there; several processes may do so at once."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    sources = [path.read_text() for path in sorted(_SOURCE_DIR.iterdir()) if path.suffix in (".cpp", ".h")]
    identity = "\0".join([*sources, version, _cpu_identity(), *_COMPILE])
    target = _cache_dir() / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        compiled, linked = Path(scratch, "kernels.o"), Path(scratch, "kernels.so")
        # Linked without -fopenmp, so that no second OpenMP runtime is pulled in.
        for command in (
            [compiler, *_COMPILE, "-c", str(_SOURCE_DIR / "kernels.cpp"), "-o", str(compiled)],
            [compiler, "-shared", str(compiled), "-o", str(linked)],
        ):
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_BUILD_TIMEOUT_S)
        linked.replace(target)
    _LOG.info("built the engine's kernels: %s", target)
    return target


def _cache_dir() -> Path:
    base = os.environ.get("EPD_CACHE_DIR")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ray-epd"


def _cpu_identity() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
