"""Chooses the model runner for a device and a dtype. The one place of the engine that knows them all."""

from __future__ import annotations

import logging

import torch

from epd.cache.kv_cache import KVCache
from epd.config import CUDA_BLOCK_SIZE, EngineConfig
from epd.engine import native
from epd.engine.cuda.attention import torch_kernel, why_unsuited
from epd.engine.cuda.graphs import CudaRecorder
from epd.engine.cuda.runner import CudaModelRunner
from epd.engine.model_runner import ModelRunner, Runner
from epd.engine.native import Kernels
from epd.errors import ConfigError
from epd.types import LanguageModel

_LOG = logging.getLogger(__name__)


def check_device(config: EngineConfig) -> None:
    """Raise ``ConfigError`` if the configured device is not there."""
    if not config.is_cuda:
        return
    if not torch.cuda.is_available():
        raise ConfigError(
            "args.engine.device",
            f"{config.device} is asked for, but torch {torch.__version__} sees no CUDA device here: give the pool "
            "num_gpus in ray_actor_options, check the driver and that torch is not a CPU build, or say cpu",
        )
    index = torch.device(config.device).index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError(
            "args.engine.device",
            f"there is no {config.device}, only {torch.cuda.device_count()} CUDA devices; under Ray, which shows a "
            "replica its own GPUs only, say cuda",
        )


def build_runner(
    model: LanguageModel, kv_cache: KVCache, config: EngineConfig, max_context_tokens: int | None = None
) -> Runner:
    """Build the runner of one engine. ``max_context_tokens`` bounds every sequence; by default the cache does.

    Raises ``ConfigError`` for a block size that no kernel on the device takes, and for kernels that are asked for and
    cannot be had.
    """
    if not config.is_cuda:
        return ModelRunner(model, kv_cache, config.device, load_kernels(kv_cache.blocks.dtype, config))
    obstacle = why_unsuited(kv_cache.spec, kv_cache.block_size, config.device)
    if obstacle is None:
        return CudaModelRunner(
            model,
            kv_cache,
            torch_kernel(),
            CudaRecorder(config.device) if config.cuda_graphs else None,
            device=config.device,
            max_num_seqs=config.max_num_seqs,
            max_context_tokens=max_context_tokens or kv_cache.num_blocks * kv_cache.block_size,
        )
    if kv_cache.spec.dtype != "float32" and kv_cache.block_size % CUDA_BLOCK_SIZE:
        raise ConfigError("args.engine.block_size", f"FlashAttention does not run: {obstacle}; leave it out")
    _LOG.warning("attention runs on torch's kernels over gathered blocks, without FlashAttention: %s", obstacle)
    return ModelRunner(model, kv_cache, config.device)


def load_kernels(dtype: torch.dtype, config: EngineConfig) -> Kernels | None:
    """Load the CPU's kernels, built if need be; ``None`` where torch's are to do the work.

    Raises ``ConfigError`` when the configuration insists on kernels that cannot be had.
    """
    if config.is_cuda or config.compile is False:
        return None
    kernels = native.load_kernels(dtype)
    if kernels is None and config.compile is True:
        reason = "they cannot be built here, see the log" if native.has_compiler() else "there is no C++ compiler here"
        if dtype not in (torch.float32, torch.bfloat16):
            reason = f"there are none for {str(dtype).removeprefix('torch.')}"
        raise ConfigError("args.engine.compile", f"true asks for native kernels, but {reason}; or say auto")
    return kernels
