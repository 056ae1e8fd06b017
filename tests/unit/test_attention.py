"""Paged attention equals dense attention, whoever computes it: if not, users get text that no reference produces.

One suite over torch's kernels and our own, in each element type and shape that a model may have.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from epd.cache.kv_cache import KVCache, allocate_kv_cache
from epd.engine import native
from epd.engine.attention import AttentionBatch, PagedLayers, PrefillChunk, build_decode_tables
from epd.engine.native import build
from epd.types import KVSpec

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
needs_compiler = pytest.mark.skipif(not native.has_compiler(), reason="no C++ compiler on this machine")
KERNELS = ["torch", pytest.param("native", marks=needs_compiler)]


def kernel_of(name: str, dtype: torch.dtype) -> native.Kernels | None:
    if name == "torch":
        return None
    kernel = native.load_kernels(dtype)
    assert kernel is not None
    return kernel


def make_cache(dtype: torch.dtype, *, num_kv_heads: int, head_dim: int, block_size: int) -> KVCache:
    spec = KVSpec(3, num_kv_heads, head_dim, str(dtype).removeprefix("torch."), dtype.itemsize)
    cache = allocate_kv_cache(spec, block_size=block_size, num_blocks=64, model_fingerprint="test")
    cache.blocks.copy_(torch.randn(cache.blocks.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def dense(cache: KVCache, layer: int, query: torch.Tensor, table: list[int], context_len: int, scale: float):
    """Attention of ``[num_tokens, num_heads, head_dim]`` that ends the context, in float32."""
    key, value = (cache.blocks[table, layer, side].flatten(0, 1)[:context_len].float() for side in (0, 1))
    num_tokens = query.shape[0]
    mask = torch.ones(num_tokens, context_len, dtype=torch.bool).tril(context_len - num_tokens)
    out = F.scaled_dot_product_attention(
        query.float().transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(12, 2, 64, 16), (4, 4, 16, 4), (8, 1, 128, 16), (6, 2, 80, 8), (2, 1, 20, 1)],
)
@pytest.mark.parametrize("context_lens", [[1], [5, 16, 17], [40, 1, 33, 8, 2, 31, 32, 3]])
def test_decodes_equal_dense_attention(kernel, dtype, num_heads, num_kv_heads, head_dim, block_size, context_lens):
    cache = make_cache(dtype, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    generator = torch.Generator().manual_seed(2)
    tables = [torch.randperm(64, generator=generator)[: -(-n // block_size)].tolist() for n in context_lens]
    query = torch.randn(num_heads, len(context_lens), head_dim, generator=generator).to(dtype)
    padded, lens = build_decode_tables(tables, context_lens, block_size, "cpu")
    none = torch.empty(0, dtype=torch.int64)
    batch = AttentionBatch(none, none, len(context_lens), padded, lens, ())
    out = PagedLayers(cache, batch, kernel_of(kernel, dtype)).attend(2, query, 0.2)
    for row, (table, length) in enumerate(zip(tables, context_lens, strict=True)):
        expected = dense(cache, 2, query[:, row : row + 1].transpose(0, 1), table, length, 0.2)
        torch.testing.assert_close(out[row : row + 1].float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixed_step_writes_and_attends_each_sequence_in_its_own_blocks(kernel, dtype):
    """Two decodes, a first chunk and a continued chunk in one packed batch."""
    cache = make_cache(dtype, num_kv_heads=2, head_dim=16, block_size=4)
    generator = torch.Generator().manual_seed(3)
    sequences = [([3, 9], 6, 1), ([1, 40, 7], 12, 1), ([5, 6], 7, 7), ([20, 21, 22, 23], 14, 5)]
    total = sum(count for _, _, count in sequences)
    query, key, value = (torch.randn(1, heads, total, 16, generator=generator).to(dtype) for heads in (4, 2, 2))
    blocks, offsets, chunks, row = [], [], [], 0
    for table, length, count in sequences:
        indexes = range(length - count, length)
        blocks += [table[index // 4] for index in indexes]
        offsets += [index % 4 for index in indexes]
        if count > 1:
            chunks.append(PrefillChunk(row, count, length, torch.tensor(table)))
        row += count
    padded, lens = build_decode_tables([table for table, _, _ in sequences[:2]], [6, 12], 4, "cpu")
    batch = AttentionBatch(torch.tensor(blocks), torch.tensor(offsets), 2, padded, lens, tuple(chunks))
    layers = PagedLayers(cache, batch, kernel_of(kernel, dtype))
    layers.update(key, value, 1)
    out, row = layers.attend(1, query[0], 0.25), 0
    for table, length, count in sequences:
        expected = dense(cache, 1, query[0, :, row : row + count].transpose(0, 1), table, length, 0.25)
        got = out[row : row + count].float()
        torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        row += count


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_give_the_same_bits_on_two_threads(dtype):
    cache = make_cache(dtype, num_kv_heads=2, head_dim=64, block_size=16)
    query = torch.randn(12, 105, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    lens = [33, 34, 48, 1, 17]
    tables, lengths = build_decode_tables([[1, 2, 3]] * 5, lens, 16, "cpu")
    none = torch.empty(0, dtype=torch.int64)
    chunk = PrefillChunk(5, 100, 101, torch.arange(10, 17))
    batches = [AttentionBatch(none, none, 5, tables, lengths, (chunk,))]
    batches += [AttentionBatch(none, none, 1, tables[:1], lengths[:1], ())]

    def outputs() -> list[torch.Tensor]:
        kernels = kernel_of("native", dtype)
        return [PagedLayers(cache, batch, kernels).attend(0, query, 0.1) for batch in batches]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = outputs()
        for num_threads in (2, 3):
            torch.set_num_threads(num_threads)
            many = outputs()
            assert torch.equal(many[0], one[0])
            assert torch.equal(many[1][:1], one[1][:1])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(12, 2, 64, 16), (4, 4, 16, 4), (8, 1, 128, 16), (6, 2, 80, 8), (2, 1, 22, 3)],
)
@pytest.mark.parametrize(("num_tokens", "context_len"), [(2, 2), (13, 130), (97, 97), (150, 190)])
def test_chunks_equal_dense_attention(
    kernel, dtype, num_heads, num_kv_heads, head_dim, block_size, num_tokens, context_len
):
    cache = make_cache(dtype, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    generator = torch.Generator().manual_seed(5)
    table = torch.randperm(64, generator=generator)[: -(-context_len // block_size)]
    context_len = min(context_len, 64 * block_size)
    query = torch.randn(num_heads, num_tokens, head_dim, generator=generator).to(dtype)
    none, (tables, lens) = torch.empty(0, dtype=torch.int64), build_decode_tables([], [], block_size, "cpu")
    batch = AttentionBatch(none, none, 0, tables, lens, (PrefillChunk(0, num_tokens, context_len, table),))
    out = PagedLayers(cache, batch, kernel_of(kernel, dtype)).attend(1, query, 0.3)
    expected = dense(cache, 1, query.transpose(0, 1), table.tolist(), context_len, 0.3)
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@needs_compiler
def test_kernels_that_do_not_build_are_done_without(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("EPD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_SOURCE_DIR", tmp_path)
    (tmp_path / "kernels.cpp").write_text("this is not C++")
    native.load_kernels.cache_clear()
    build.load_library.cache_clear()
    try:
        assert native.load_kernels(torch.float32) is None
        assert "could not be built" in caplog.text
        assert list(tmp_path.glob("*.so")) == []
    finally:
        native.load_kernels.cache_clear()
        build.load_library.cache_clear()
