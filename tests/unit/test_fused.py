"""A decoder's layers as one kernel call equal transformers' layers, for each kind that is taken to be computable so.

If these fail, a model answers other things on the CPU with a C++ compiler than without.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GraniteConfig,
    GraniteModel,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    Phi3Config,
    Phi3Model,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3Model,
)

from epd.cache.kv_cache import KVCache, allocate_kv_cache
from epd.engine.attention import (
    ATTENTION,
    AttentionBatch,
    PagedLayers,
    PrefillChunk,
    build_decode_tables,
    register_attention,
)
from epd.engine.fused import FusedDecoder, can_fuse
from epd.engine.native import load_kernels
from epd.types import KVSpec

pytestmark = pytest.mark.skipif(load_kernels(torch.float32) is None, reason="there is no C++ compiler here")

SIZES = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 74,  # fills no panel
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
KINDS: dict[str, Any] = {
    "biases of q, k and v": lambda: Qwen2Model(Qwen2Config(**SIZES)),
    "no biases": lambda: LlamaModel(LlamaConfig(**SIZES)),
    "all biases": lambda: LlamaModel(LlamaConfig(**SIZES, attention_bias=True)),
    "norms of queries and keys, wide heads": lambda: Qwen3Model(Qwen3Config(**SIZES, head_dim=20)),
    "heads of their own size": lambda: LlamaModel(LlamaConfig(**SIZES, head_dim=10)),
}
BLOCK_SIZE = 4
NUM_TOKENS = 2 + 9 + 5  # two decodes, a first chunk, and a chunk after 7 tokens


def make(kind: str, dtype: torch.dtype) -> tuple[Any, torch.nn.Linear]:
    torch.manual_seed(3)
    register_attention()
    model = KINDS[kind]()
    model.config._attn_implementation = ATTENTION
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.05, std=0.2)
    head = torch.nn.Linear(SIZES["hidden_size"], SIZES["vocab_size"], bias=False)
    return model.to(dtype).eval().requires_grad_(False), head.to(dtype).requires_grad_(False)


def make_cache(model: Any, dtype: torch.dtype) -> KVCache:
    head_dim = model.layers[0].self_attn.head_dim
    spec = KVSpec(3, SIZES["num_key_value_heads"], head_dim, str(dtype).removeprefix("torch."), dtype.itemsize)
    cache = allocate_kv_cache(spec, block_size=BLOCK_SIZE, num_blocks=20, model_fingerprint="test")
    cache.blocks.copy_(torch.randn(cache.blocks.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def make_batch() -> AttentionBatch:
    tables, contexts = [[3, 1], [7], [9, 4, 12], [2, 15, 8]], [6, 3, 9, 12]
    counts = [1, 1, 9, 5]
    positions = [
        (table[index // BLOCK_SIZE], index % BLOCK_SIZE)
        for table, context, count in zip(tables, contexts, counts, strict=True)
        for index in range(context - count, context)
    ]
    blocks, offsets = torch.tensor(positions).unbind(1)
    padded, lens = build_decode_tables(tables[:2], contexts[:2], BLOCK_SIZE, "cpu")
    chunks = (PrefillChunk(2, 9, 9, torch.tensor(tables[2])), PrefillChunk(11, 5, 12, torch.tensor(tables[3])))
    return AttentionBatch(blocks.contiguous(), offsets.contiguous(), 2, padded, lens, chunks)


def inputs(model: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(NUM_TOKENS, SIZES["hidden_size"], generator=generator).to(dtype)
    cos, sin = model.rotary_emb(hidden[None], torch.randint(0, 50, (1, NUM_TOKENS), generator=generator))
    return hidden, cos, sin


@torch.inference_mode()
def by_modules(model: Any, cache: KVCache, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    hidden, cos, sin = given
    paged, states = PagedLayers(cache, make_batch()), hidden[None]
    for layer in model.layers:
        states = layer(
            states, attention_mask=None, cache=paged, use_cache=True, position_embeddings=(cos, sin), paged=paged
        )
    return model.norm(states)[0].float()


@torch.inference_mode()
def by_kernels(fused: FusedDecoder, model: Any, cache: KVCache, dtype: torch.dtype) -> torch.Tensor:
    hidden, cos, sin = inputs(model, dtype)
    step = PagedLayers(cache, make_batch(), load_kernels(dtype)).native_step()
    assert step is not None
    return fused.forward(hidden, cos[0], sin[0], step).float()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_layers_equal_those_of_transformers(kind: str, num_threads: int) -> None:
    before = torch.get_num_threads()
    model, head = make(kind, torch.float32)
    assert can_fuse(model, head)
    caches = [make_cache(model, torch.float32) for _ in range(2)]
    expected = by_modules(model, caches[0], inputs(model, torch.float32))
    fused = FusedDecoder(model, head, SIZES["num_key_value_heads"])
    kernels = load_kernels(torch.float32)
    assert kernels is not None
    fused.take_weights(kernels)
    torch.set_num_threads(num_threads)
    try:
        actual = by_kernels(fused, model, caches[1], torch.float32)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(caches[1].blocks, caches[0].blocks, rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(fused.logits(actual), head(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_bfloat16_layers_are_as_exact_as_those_of_transformers(kind: str) -> None:
    model, head = make(kind, torch.bfloat16)
    theirs = by_modules(model, make_cache(model, torch.bfloat16), inputs(model, torch.bfloat16))
    fused = FusedDecoder(model, head, SIZES["num_key_value_heads"])
    kernels = load_kernels(torch.bfloat16)
    assert kernels is not None
    fused.take_weights(kernels)
    ours = by_kernels(fused, model, make_cache(model, torch.bfloat16), torch.bfloat16)
    fused.give_weights_back()
    exact_cache = make_cache(model, torch.bfloat16)
    exact_spec = KVSpec(3, exact_cache.spec.num_kv_heads, exact_cache.spec.head_dim, "float32", 4)
    widened = allocate_kv_cache(exact_spec, block_size=BLOCK_SIZE, num_blocks=20, model_fingerprint="test")
    widened.blocks.copy_(exact_cache.blocks)
    given = inputs(model, torch.bfloat16)
    exact = by_modules(model.float(), widened, tuple(tensor.float() for tensor in given))
    assert (ours - exact).abs().mean() < 1.3 * (theirs - exact).abs().mean() + 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_weights_given_back_are_those_that_were_taken(kind: str) -> None:
    model, head = make(kind, torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fused = FusedDecoder(model, head, SIZES["num_key_value_heads"])
    kernels = load_kernels(torch.float32)
    assert kernels is not None
    fused.take_weights(kernels)
    assert fused.is_active
    assert model.layers[0].mlp.up_proj.weight.numel() == 0
    fused.give_weights_back()
    assert not fused.is_active
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize(
    "make_model",
    [
        lambda: GraniteModel(GraniteConfig(**SIZES, residual_multiplier=0.2)),
        lambda: Phi3Model(Phi3Config(**SIZES)),
        lambda: MistralModel(MistralConfig(**SIZES, sliding_window=8)),
        lambda: LlamaModel(LlamaConfig(**SIZES, mlp_bias=True)),
    ],
    ids=["scaled residuals", "joined projections", "sliding window", "biases of the MLP"],
)
def test_layers_of_another_kind_are_left_to_transformers(make_model: Any) -> None:
    head = torch.nn.Linear(SIZES["hidden_size"], SIZES["vocab_size"], bias=False)
    assert not can_fuse(make_model(), head)
