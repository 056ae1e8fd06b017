"""Linear layers on the engine's CPU kernels. If these fail, tokens and embeddings are wrong on CPUs, for some numbers
of rows: tiles of few rows, of many, and halves that are widened once are different code."""

from __future__ import annotations

import pytest
import torch

from epd.engine.native import Kernels, load_kernels
from epd.engine.native.linear import PanelLinear, use_panels
from epd.engine.packing import pack_panels

ROWS = [*range(1, 15), 23, 24, 25, 26, 29, 61, 128]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    loaded = load_kernels(request.param)
    if loaded is None:
        pytest.skip("no C++ compiler")
    return loaded


def reference(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result = inputs.double() @ weight.double().T
    if bias is not None:
        result = result + bias.double()
    return result.to(inputs.dtype)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(2, 1), (34, 31), (96, 32), (130, 33), (256, 100)])
def test_a_product_is_the_reference_rounded_once(
    kernels: Kernels, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    inputs = torch.randn(num_rows, num_inputs, generator=generator).to(kernels.dtype)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(kernels.dtype)
    bias = torch.randn(num_outputs, generator=generator).to(kernels.dtype)

    plain = kernels.linear(inputs, pack_panels(weight), num_outputs)
    biased = kernels.linear(inputs, pack_panels(weight), num_outputs, bias)

    # One unit in the last place, where summing in another order crosses the middle between two numbers.
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if kernels.dtype is torch.float32 else {"rtol": 2**-7, "atol": 1e-4}
    torch.testing.assert_close(plain, reference(inputs, weight, None).float(), **tolerance)
    torch.testing.assert_close(biased, reference(inputs, weight, bias).float(), **tolerance)


def test_it_stands_in_for_torchs_layer(kernels: Kernels) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Sequential(torch.nn.Linear(48, 40, bias=False)))
    model = model.to(kernels.dtype)
    inputs = torch.randn(2, 5, 64).to(kernels.dtype)
    expected = model(inputs)

    use_panels(model, kernels)

    assert isinstance(model[0], PanelLinear)
    assert isinstance(model[1][0], PanelLinear)
    result = model(inputs)
    assert result.dtype is kernels.dtype
    torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02)


def test_inputs_that_do_not_pair_up_stay_with_torch(kernels: Kernels) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(7, 4)).to(kernels.dtype)

    use_panels(model, kernels)

    assert isinstance(model[0], torch.nn.Linear)
