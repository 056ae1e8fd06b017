"""Engines over the fake language model, and requests for them."""

from __future__ import annotations

import random

import torch

from epd.cache.kv_cache import allocate_kv_cache
from epd.config import EngineConfig
from epd.engine.engine import Engine
from epd.types import MediaItem, Modality, PlaceholderRange, Request, SamplingParams
from tests.fake_language_model import HIDDEN, FakeLanguageModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def make_engine(*, num_blocks: int = 64, block_size: int = 4, max_tokens: int = 16, max_seqs: int = 8, **fields):
    model = fields.pop("model", None) or FakeLanguageModel()
    config = EngineConfig(
        block_size=block_size, max_num_batched_tokens=max_tokens, max_num_seqs=max_seqs, kv_cache_bytes=1, **fields
    )
    cache = allocate_kv_cache(model.kv_spec, block_size=block_size, num_blocks=num_blocks, model_fingerprint="fake")
    return Engine(model, cache, config), model


def prompt(request_id: str, num_tokens: int, *, seed: int = 0, sampling: SamplingParams = GREEDY) -> Request:
    rng = random.Random(f"{seed}-{num_tokens}")
    return Request(request_id, tuple(rng.randrange(50) for _ in range(num_tokens)), sampling)


def image_request(request_id: str, mm_hash: str, *, num_rows: int = 6, sampling: SamplingParams = GREEDY) -> Request:
    item = MediaItem(0, Modality.IMAGE, mm_hash, PlaceholderRange(3, num_rows), (1, 2, 2 * num_rows))
    return Request(request_id, (1, 2, 3, *[9] * num_rows, 4, 5, 6), sampling, items=(item,))


def rows_of(mm_hash: str, num_rows: int = 6) -> torch.Tensor:
    return torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(sum(mm_hash.encode())))
