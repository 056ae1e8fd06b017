"""The CPU kernel of decode attention: built from source on first use, kept in a cache directory, called by address.

Owns building and loading; the arithmetic is in ``paged_attention.cpp``. A machine without a C++ compiler goes without
it (``load_decode_kernel`` says why), and torch's own kernels do the work. Knows nothing of engines or steps.
"""

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

import torch

from epd.cache.kv_cache import KVCache

_LOG = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("paged_attention.cpp")
_COMPILE = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp", "-fPIC", "-std=c++17")
_BUILD_TIMEOUT_S = 120.0
_SYMBOLS = {torch.float32: "epd_paged_decode_float32", torch.bfloat16: "epd_paged_decode_bfloat16"}


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("block_stride", "side_stride", "token_stride", "max_blocks")),
        *((name, ctypes.c_int64) for name in ("block_size", "num_heads", "num_kv_heads", "head_dim")),
        ("scale", ctypes.c_float),
    )


class DecodeKernel:
    """Decode attention over block tables, for one element type. Called without the GIL."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._function = getattr(library, _SYMBOLS[dtype])
        self._function.restype = None
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._function.argtypes = [pointer, pointer, pointer, pointer, pointer, count, pointer, count]

    def __call__(
        self,
        query: torch.Tensor,
        kv_cache: KVCache,
        layer_idx: int,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Return ``[num_seqs, num_heads, head_dim]`` for a contiguous query of that shape.

        ``block_tables`` is int64 ``[num_seqs, max_blocks]`` and ``context_lens`` int64 ``[num_seqs]``, both contiguous.
        """
        num_seqs, num_heads, head_dim = query.shape
        blocks = kv_cache.blocks
        out = torch.empty_like(query)
        shape = _Shape(
            block_stride=blocks.stride(0),
            side_stride=blocks.stride(2),
            token_stride=blocks.stride(3),
            max_blocks=block_tables.shape[1],
            block_size=kv_cache.block_size,
            num_heads=num_heads,
            num_kv_heads=blocks.shape[4],
            head_dim=head_dim,
            scale=scale,
        )
        layer = blocks.data_ptr() + layer_idx * blocks.stride(1) * blocks.element_size()
        self._function(
            query.data_ptr(),
            layer,
            block_tables.data_ptr(),
            context_lens.data_ptr(),
            out.data_ptr(),
            num_seqs,
            ctypes.byref(shape),
            torch.get_num_threads(),
        )
        return out


@cache
def load_decode_kernel(dtype: torch.dtype) -> DecodeKernel | None:
    """Return the kernel for an element type, built if need be; ``None``, with a log line, where it cannot be had."""
    if dtype not in _SYMBOLS:
        return None
    library = _load_library()
    return None if library is None else DecodeKernel(library, dtype)


def has_compiler() -> bool:
    return _compiler() is not None


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


@cache
def _load_library() -> ctypes.CDLL | None:
    compiler = _compiler()
    if compiler is None:
        _LOG.info("no C++ compiler: decode attention runs on torch's kernels, at a fraction of the speed")
        return None
    try:
        # torch's OpenMP runtime is loaded globally, and the library binds to it: one pool of threads in the process.
        return ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        _LOG.warning("the decode attention kernel could not be built, torch's kernels run instead: %s", detail)
        return None


def _build(compiler: str) -> Path:
    """Compile into the cache, unless it is there; several processes may do so at once."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    identity = "\0".join([_SOURCE.read_text(), version, _cpu_identity(), *_COMPILE])
    target = _cache_dir() / f"paged_attention-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        compiled, linked = Path(scratch, "kernel.o"), Path(scratch, "kernel.so")
        # Linked without -fopenmp, so that no second OpenMP runtime is pulled in.
        for command in (
            [compiler, *_COMPILE, "-c", str(_SOURCE), "-o", str(compiled)],
            [compiler, "-shared", str(compiled), "-o", str(linked)],
        ):
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_BUILD_TIMEOUT_S)
        linked.replace(target)
    _LOG.info("built the decode attention kernel: %s", target)
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
