"""FlashAttention over the pool's own pages equals dense attention: if not, a GPU replica answers something else.

What the kernel takes was read in its source; these tests are where it is held to that.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from epd.cache.kv_cache import KVCache, allocate_kv_cache
from epd.engine.cuda.attention import VarlenBatch, VarlenLayers, torch_kernel, why_unsuited
from epd.types import KVSpec

DEVICE = "cuda"
NUM_BLOCKS, NUM_LAYERS, LAYER, SCALE = 24, 3, 1, 0.2
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
HEADS = [(8, 2, 64), (12, 2, 128), (4, 4, 64), (4, 2, 16), (8, 1, 256)]
"""Query heads, KV heads and head size: with groups and without, from the tests' tiny checkpoint to large heads."""


def make_cache(dtype: torch.dtype, num_kv_heads: int, head_dim: int, block_size: int) -> KVCache:
    spec = KVSpec(NUM_LAYERS, num_kv_heads, head_dim, str(dtype).removeprefix("torch."), dtype.itemsize)
    cache = allocate_kv_cache(
        spec, block_size=block_size, num_blocks=NUM_BLOCKS, model_fingerprint="test", device=DEVICE
    )
    assert why_unsuited(spec, block_size, DEVICE) is None
    generator = torch.Generator(DEVICE).manual_seed(1)
    cache.pages.copy_(torch.randn(cache.pages.shape, generator=generator, device=DEVICE))
    return cache


def dense(cache: KVCache, query: torch.Tensor, table: list[int], context_len: int) -> torch.Tensor:
    """Attention of ``[num_tokens, num_heads, head_dim]`` that ends the context, in float32."""
    key, value = (cache.pages[table, LAYER, side].flatten(0, 1)[:context_len].float() for side in (0, 1))
    num_tokens = query.shape[0]
    mask = torch.ones(num_tokens, context_len, dtype=torch.bool, device=DEVICE).tril(context_len - num_tokens)
    heads = (tensor.transpose(0, 1)[None] for tensor in (query.float(), key, value))
    return F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("block_size", [256, 512])
@pytest.mark.parametrize(
    "sequences",
    [
        [(1, 1)],
        [(1, 700), (1, 3), (1, 256), (1, 257)],
        [(1, 2000), (1, 2000)],
        [(40, 40)],
        [(1, 900), (1, 12), (300, 300), (5, 600)],
        [(64, 1500), (3, 1999)],
    ],
    ids=["one", "decodes", "long decodes", "prompt", "mixed", "continued chunks"],
)
def test_a_step_equals_dense_attention(dtype, num_heads, num_kv_heads, head_dim, block_size, sequences):
    cache = make_cache(dtype, num_kv_heads, head_dim, block_size)
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(2)).tolist()
    tables = []
    for _, length in sequences:
        num_blocks = -(-length // block_size)
        tables.append(order[:num_blocks])
        order = order[num_blocks:]
    total = sum(count for count, _ in sequences)
    generator = torch.Generator(DEVICE).manual_seed(3)
    query, key, value = (
        torch.randn(1, heads, total, head_dim, generator=generator, device=DEVICE).to(dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    layers = VarlenLayers(cache.pages, batch_of(sequences, tables, block_size), torch_kernel())
    before = cache.pages.clone()
    layers.update(key, value, LAYER)
    out = layers.attend(LAYER, query[0], SCALE)
    row = 0
    for (count, length), table in zip(sequences, tables, strict=True):
        rows = slice(row, row + count)
        expected = dense(cache, query[0, :, rows].transpose(0, 1), table, length)
        torch.testing.assert_close(out[rows].float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        row += count
    assert int((cache.pages != before).any(dim=(-1, -2)).sum()) == 2 * total, "one slot a token, in one layer, K and V"


def batch_of(sequences: list[tuple[int, int]], tables: list[list[int]], block_size: int) -> VarlenBatch:
    indexes = [
        (table, index) for (n, end), table in zip(sequences, tables, strict=True) for index in range(end - n, end)
    ]
    counts, lens = (torch.tensor(side) for side in zip(*sequences, strict=True))
    padded = torch.zeros(len(tables), max(map(len, tables)), dtype=torch.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = torch.tensor(table)

    def cumulative(values: torch.Tensor) -> torch.Tensor:
        return F.pad(values.cumsum(0), (1, 0)).int().to(DEVICE)

    return VarlenBatch(
        slot_blocks=torch.tensor([table[index // block_size] for table, index in indexes], device=DEVICE),
        slot_offsets=torch.tensor([index % block_size for _, index in indexes], device=DEVICE),
        cu_seq_q=cumulative(counts),
        cu_seq_k=cumulative(lens),
        context_lens=lens.int().to(DEVICE),
        tables=padded.to(DEVICE),
        max_q=int(counts.max()),
        max_k=int(lens.max()),
    )
