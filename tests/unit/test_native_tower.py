"""A vision block as one kernel call equals transformers' block.

If these fail, pictures look different to the model with a C++ compiler than without, or only on some sizes or machines.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionBlock

from encoders.qwen2_5_vl.fused_tower import can_fuse_blocks, fuse_blocks
from epd.engine.native import load_kernels

pytestmark = pytest.mark.skipif(load_kernels(torch.float32) is None, reason="there is no C++ compiler here")

SHAPES = {  # hidden size, heads, intermediate size
    "of the usual sizes": (128, 2, 256),
    "whose sizes fill no panel": (40, 4, 54),
    "with heads of 80": (160, 2, 200),
}
SEGMENTS = {
    "one segment": [0, 64],
    "uneven segments": [0, 5, 6, 70, 200],
    "one row": [0, 1],
    "more rows than share a packing": [0, 500, 1000],
}


class Tower(torch.nn.Module):
    def __init__(self, shape: str, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, heads, intermediate = SHAPES[shape]
        config = Qwen2_5_VLVisionConfig(hidden_size=hidden, num_heads=heads, intermediate_size=intermediate, depth=1)
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList([Qwen2_5_VLVisionBlock(config)])
        for parameter in self.parameters():  # norms and biases too
            torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
        self.to(dtype).eval().requires_grad_(False)


def inputs(shape: str, segments: str, dtype: torch.dtype) -> dict[str, Any]:
    hidden, heads, _ = SHAPES[shape]
    starts = torch.tensor(SEGMENTS[segments], dtype=torch.int32)
    num_rows, dim = int(starts[-1]), hidden // heads
    generator = torch.Generator().manual_seed(1)
    angles = torch.rand(num_rows, dim // 2, generator=generator).repeat(1, 2) * 6
    return {
        "hidden_states": torch.randn(num_rows, hidden, generator=generator).to(dtype),
        "cu_seqlens": starts,
        "position_embeddings": (angles.cos(), angles.sin()),
    }


def run(block: torch.nn.Module, shape: str, segments: str, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode():
        return block(**inputs(shape, segments, dtype)).float()


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def _threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_equals_that_of_transformers(shape: str, segments: str) -> None:
    tower = Tower(shape, torch.float32)
    kernels = load_kernels(torch.float32)
    assert kernels is not None
    assert can_fuse_blocks(tower, kernels)
    expected = run(tower.blocks[0], shape, segments, torch.float32)
    fuse_blocks(tower, kernels)
    torch.testing.assert_close(run(tower.blocks[0], shape, segments, torch.float32), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_bfloat16_block_is_as_exact_as_that_of_transformers(shape: str, segments: str) -> None:
    exact = run(Tower(shape, torch.bfloat16).float().blocks[0], shape, segments, torch.float32)
    tower = Tower(shape, torch.bfloat16)
    theirs = (run(tower.blocks[0], shape, segments, torch.bfloat16) - exact).abs().mean()
    kernels = load_kernels(torch.bfloat16)
    assert kernels is not None
    fuse_blocks(tower, kernels)
    ours = (run(tower.blocks[0], shape, segments, torch.bfloat16) - exact).abs().mean()
    assert ours < 1.3 * theirs + 1e-3


def test_a_tower_of_another_kind_is_left_to_transformers() -> None:
    kernels = load_kernels(torch.float32)
    assert kernels is not None
    tower: Any = Tower("of the usual sizes", torch.float32)
    tower.blocks[0].mlp.act_fn = torch.nn.GELU()
    assert not can_fuse_blocks(tower, kernels)
