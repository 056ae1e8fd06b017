"""What happens before a replica is ready: if these fail, first requests are slow, or find what a warm-up left behind.

A warm-up that stays in the prefix cache would answer users out of made-up prompts; one that fails in silence hides a
configuration that cannot work.
"""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import pytest
import torch

from encoders import resolve_family
from epd.cache.kv_cache import allocate_kv_cache
from epd.config import EngineConfig, MediaConfig, ModelConfig, TransferConfig
from epd.engine import native
from epd.engine.engine import EngineStats
from epd.engine.model_runner import ModelRunner
from epd.engine.native import build as native_build
from epd.engine.runners import load_kernels
from epd.engine.warmup import CACHE_DIR_VARIABLE, phase, use_cache_dir, warm_up
from epd.errors import ConfigError
from epd.stages.startup import prepare
from epd.stages.worker import StageWorker
from epd.transfer.in_process import InProcessPeers
from epd.types import Mode, Stage
from tests.fake_language_model import FakeLanguageModel
from tests.in_process import in_process_cluster
from tests.reference import DEMO, build, expected_tokens
from tests.varlen_reference import RerunRecorder, cuda_runner_on_cpu

RUN = subprocess.run
PHASES = {
    "loading native kernels",
    "loading the language model",
    "allocating the KV cache",
    "warming up prefill and decode",
    "loading the encoder",
    "warming up the encoder",
}


def make_worker(model_dir: Path | str, roles: frozenset[Stage] = frozenset(Stage), **engine: object) -> StageWorker:
    model = ModelConfig(source=str(model_dir))
    return StageWorker(
        replica_id="replica",
        pool="pool",
        roles=roles,
        family=resolve_family(model),
        model=model,
        engine=EngineConfig(kv_cache_bytes=2**20, num_threads=1, **engine),
        transfer=TransferConfig(),
        media=MediaConfig(),
        peers=InProcessPeers(),
        backend="by_reference",
    )


async def test_a_warm_replica_is_as_empty_as_a_new_one(tiny_qwen_dir):
    worker = make_worker(tiny_qwen_dir)
    new_stats, new_load = worker.stats(), worker.load()
    await worker.start()
    try:
        await worker.check_integrity()
        engine = await worker.engine_thread.call(lambda running: running)
        assert engine.stats == EngineStats()
        assert engine.pool.num_free == engine.pool.num_blocks
        assert len(engine.scheduler.prefix_cache) == 0
        assert not engine.live_request_ids
        assert not engine.kv_cache.blocks.any()
        assert worker.stats() == new_stats
        assert worker.load().num_free_blocks == new_load.num_free_blocks == new_load.num_blocks
        assert len(worker._embeddings) == 0
    finally:
        await worker.close()


async def test_the_first_request_of_a_warm_replica_hits_nothing_and_gets_its_own_tokens(tiny_qwen_dir):
    async with in_process_cluster(tiny_qwen_dir, names=("all",)) as cluster:
        prompt = build("tiny", "one image")
        tokens, chunks = await cluster.run(prompt.request, prompt.payloads, Mode.AGGREGATED)
        assert tuple(tokens[0]) == expected_tokens("tiny", "one image")
        assert chunks[0].report.cached.get("prefix_tokens", 0) == 0
        assert chunks[0].report.cached.get("embedding_items", 0) == 0
        await cluster.check_integrity()


async def test_each_phase_is_a_line_with_its_duration(tiny_qwen_dir, caplog):
    caplog.set_level(logging.INFO, "epd")
    worker = make_worker(tiny_qwen_dir)
    await worker.start()
    await worker.close()
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("start of replica: ")]
    assert {line.split(": ", 1)[1].split(" took ")[0] for line in lines} == PHASES
    assert all(float(line.split(" took ")[1].removesuffix(" s")) >= 0 for line in lines)
    assert len(lines) == len(PHASES)


async def test_an_encoder_alone_has_the_encoders_phases(tiny_qwen_dir, caplog):
    caplog.set_level(logging.INFO, "epd")
    worker = make_worker(tiny_qwen_dir, frozenset({Stage.ENCODE}))
    await worker.start()
    await worker.close()
    assert {record.getMessage().split(": ", 1)[1].split(" took ")[0] for record in caplog.records} == {
        "loading the encoder",
        "warming up the encoder",
    }


def test_a_phase_is_timed_by_the_clock_that_it_is_given(caplog):
    caplog.set_level(logging.INFO, "epd")
    times = iter([3.0, 4.25])
    with phase("r0", "thinking", lambda: next(times)):
        pass
    assert caplog.messages == ["start of r0: thinking took 1.250 s"]


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize(
    ("num_blocks", "block_size", "max_tokens", "max_seqs"),
    [(64, 4, 1024, 64), (1, 1, 4, 1), (1, 2, 1, 1), (3, 4, 2, 2)],
)
def test_any_size_of_engine_can_be_warmed_up(num_blocks, block_size, max_tokens, max_seqs, has_graphs):
    model = FakeLanguageModel()
    cache = allocate_kv_cache(model.kv_spec, block_size=block_size, num_blocks=num_blocks, model_fingerprint="fake")
    runner = ModelRunner(model, cache)
    if has_graphs:
        runner = cuda_runner_on_cpu(model, cache, RerunRecorder(), max_num_seqs=max_seqs)
        model.steps.clear()
    warm_up(runner, cache, max_num_batched_tokens=max_tokens, max_num_seqs=max_seqs)
    assert not cache.blocks.any()
    assert all(num_tokens <= max_tokens for num_tokens in model.steps)
    assert bool(model.steps) == (num_blocks * block_size > 1)


def test_a_warm_up_runs_prompts_chunks_and_batches():
    model = FakeLanguageModel()
    cache = allocate_kv_cache(model.kv_spec, block_size=4, num_blocks=64, model_fingerprint="fake")
    warm_up(ModelRunner(model, cache), cache, max_num_batched_tokens=1024, max_num_seqs=64)
    assert set(model.steps) == {64, 32, 1, 4, 16}


# -- compiled kernels


def test_the_cache_directory_is_the_configured_one(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_DIR_VARIABLE, "before")
    use_cache_dir(None)
    assert native_build._cache_dir() == Path("before")
    use_cache_dir(str(tmp_path))
    assert native_build._cache_dir() == tmp_path
    monkeypatch.setenv("HOME", "/home/somebody")
    use_cache_dir("~/kernels")
    assert native_build._cache_dir() == Path("/home/somebody/kernels")


@pytest.mark.skipif(not native.has_compiler(), reason="no C++ compiler on this machine")
def test_kernels_are_built_once_into_the_configured_directory(monkeypatch, tmp_path):
    sources, kept = tmp_path / "sources", tmp_path / "kept"
    sources.mkdir()
    (sources / "kernels.cpp").write_text('extern "C" int epd_test() { return 7; }')
    monkeypatch.setattr(native_build, "_SOURCE_DIR", sources)
    monkeypatch.setenv(CACHE_DIR_VARIABLE, "elsewhere")
    prepare(EngineConfig(compile_cache_dir=str(kept)))
    try:
        for _ in range(2):  # as two starts would
            native_build.load_library.cache_clear()
            assert native_build.load_library().epd_test() == 7
            monkeypatch.setattr(native_build.subprocess, "run", only_ask_for_the_version)
    finally:
        native_build.load_library.cache_clear()
    assert len(list(kept.glob("*.so"))) == 1


def only_ask_for_the_version(command, **options):
    assert command[1:] == ["--version"], "the kernels were built again"
    return RUN(command, **options)


def test_kernels_that_are_asked_for_and_cannot_be_had_stop_the_start(monkeypatch, tiny_qwen_dir):
    monkeypatch.setattr(native, "load_kernels", lambda dtype: None)
    with pytest.raises(ConfigError, match=r"args\.engine\.compile: true asks for native kernels, but"):
        make_worker(tiny_qwen_dir, compile=True)
    assert load_kernels(torch.float32, EngineConfig()) is None
    with pytest.raises(ConfigError, match="there are none for float16"):
        load_kernels(torch.float16, EngineConfig(compile=True))


def test_kernels_that_are_not_wanted_are_not_loaded(monkeypatch):
    def refuse(dtype: torch.dtype) -> None:
        raise AssertionError("a kernel was loaded")

    monkeypatch.setattr(native, "load_kernels", refuse)
    assert load_kernels(torch.float32, EngineConfig(compile=False)) is None
    assert load_kernels(torch.bfloat16, EngineConfig(device="cuda", compile=True)) is None


async def test_the_built_in_model_warms_up(caplog):
    worker = make_worker(DEMO)
    await worker.start()
    await worker.check_integrity()
    await worker.close()
