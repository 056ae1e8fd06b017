"""What all tests share: one thread per process, no hub, and a tiny checkpoint."""

from __future__ import annotations

import os

# Before anything imports torch or transformers: they read these once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_checkpoints import tiny_qwen2_5_vl


@pytest.fixture(scope="session")
def tiny_qwen_dir() -> Path:
    """A random tiny Qwen2.5-VL in float32, with tokenizer and image processor."""
    return tiny_qwen2_5_vl()


@pytest.fixture(autouse=True)
def _ordinary_scheduling() -> Iterator[None]:
    """No test may leave its thread under real-time scheduling: threads started later inherit it, and starve others."""
    if not hasattr(os, "sched_getscheduler"):
        yield
        return
    before = os.sched_getscheduler(0)
    yield
    assert os.sched_getscheduler(0) == before
