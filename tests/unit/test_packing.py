"""Packed weights must not change what a model says: only how fast it says it."""

from __future__ import annotations

import pytest
import torch

from epd.engine.packing import PackedLinear, can_pack, pack_linears

pytestmark = pytest.mark.skipif(
    not can_pack(torch.bfloat16, "cpu"), reason="this CPU has no bfloat16 matrix kernels to pack for"
)


@pytest.mark.parametrize("num_rows", [1, 7, 64, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_gives_the_same_bits(num_rows, bias):
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 80, bias=bias, dtype=torch.bfloat16)
    inputs = torch.randn(2, num_rows, 96).bfloat16()
    with torch.inference_mode():
        assert torch.equal(PackedLinear(linear)(inputs), linear(inputs))


def test_packing_reaches_nested_layers_and_drops_the_plain_weights():
    torch.manual_seed(0)
    linears = [torch.nn.Linear(32, 32, dtype=torch.bfloat16) for _ in range(3)]
    model = torch.nn.Sequential(linears[0], torch.nn.Sequential(linears[1], torch.nn.GELU()), linears[2])
    inputs = torch.randn(3, 32).bfloat16()
    with torch.inference_mode():
        before = model(inputs)
        pack_linears(model)
        assert torch.equal(model(inputs), before)
    assert list(model.parameters()) == []


def test_float32_is_left_alone():
    assert not can_pack(torch.float32, "cpu")
    assert not can_pack(torch.bfloat16, "cuda")
