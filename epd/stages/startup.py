"""The start of a replica, phase by phase: load, allocate, compile, and run everything once before the first request.

Each phase is a line in the log with its duration. Knows what a replica is made of, and nothing of what it does later.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from PIL import Image

from epd.cache.kv_cache import KVCache, allocate_kv_cache
from epd.config import EngineConfig
from epd.engine.engine import Engine
from epd.engine.engine_thread import EngineThread
from epd.engine.model_runner import Runner
from epd.engine.runners import build_runner, check_device, load_kernels
from epd.engine.warmup import phase, use_cache_dir, warm_up
from epd.stages.encoding import EncodeService
from epd.types import Encoder, LanguageModel, MediaItem, Modality, ModelFamily, PlaceholderRange

_WARM_UP_SIZE = (224, 224)


def prepare(config: EngineConfig) -> None:
    """Check and set what holds for the whole process. Raises ``ConfigError`` if the device is not there."""
    check_device(config)
    use_cache_dir(config.compile_cache_dir)


def load_encoder(replica_id: str, family: ModelFamily, dtype: str, config: EngineConfig) -> Encoder:
    """Load the vision tower. Raises ``ConfigError`` for kernels that are asked for and cannot be had."""
    with phase(replica_id, "loading the encoder"):
        kernels = load_kernels(getattr(torch, dtype), config)
        return family.load_encoder(dtype=dtype, device=config.device, kernels=kernels)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and what it runs on, before the first request."""

    engine: Engine
    runner: Runner
    kv_cache: KVCache
    config: EngineConfig

    def warm_up(self) -> None:
        """Run the usual shapes once, on the thread that will step."""
        limits = self.config.max_num_batched_tokens, self.config.max_num_seqs
        warm_up(self.runner, self.kv_cache, max_num_batched_tokens=limits[0], max_num_seqs=limits[1])


def load_engine(replica_id: str, family: ModelFamily, dtype: str, config: EngineConfig) -> LoadedEngine:
    """Load the language model, and build an engine over a KV cache of the configured size.

    Raises ``ConfigError`` for kernels that are asked for and cannot be had, before any weight is read.
    """
    with phase(replica_id, "loading native kernels"):
        load_kernels(getattr(torch, dtype), config)
    with phase(replica_id, "loading the language model"):
        model = family.load_language_model(dtype=dtype, device=config.device)
    with phase(replica_id, "allocating the KV cache"):
        kv_cache = _allocate(model, family, config)
    runner = build_runner(model, kv_cache, config, family.max_model_len)
    return LoadedEngine(Engine(model, kv_cache, config, runner=runner), runner, kv_cache, config)


def _allocate(model: LanguageModel, family: ModelFamily, config: EngineConfig) -> KVCache:
    return allocate_kv_cache(
        model.kv_spec,
        block_size=config.kv_block_size,
        num_blocks=max(1, config.kv_cache_bytes // (config.kv_block_size * model.kv_spec.bytes_per_token)),
        model_fingerprint=family.fingerprint,
        device=config.device,
    )


async def warm_up_engine(replica_id: str, thread: EngineThread, loaded: LoadedEngine) -> None:
    """Run the usual shapes on the engine's thread, and record those that will be replayed."""
    with phase(replica_id, "warming up prefill and decode"):
        await thread.call(lambda _: loaded.warm_up())
    if loaded.config.is_cuda:
        with phase(replica_id, "capturing decode graphs"):
            await thread.call(lambda _: loaded.runner.capture_graphs())


async def warm_up_encoder(replica_id: str, service: EncodeService, family: ModelFamily) -> None:
    """Encode a blank image for nothing."""
    layout = family.image_layout(*_WARM_UP_SIZE)
    item = MediaItem(0, Modality.IMAGE, "warm-up", PlaceholderRange(0, layout.num_tokens), layout.grid_thw)
    with phase(replica_id, "warming up the encoder"):
        await service.warm_up(item, [Image.new("RGB", _WARM_UP_SIZE)])
