"""``torch.nn.Linear`` on the engine's CPU kernels, for what stands beside layers that run there as a whole.

Torch multiplies half precision at a fiftieth of the speed of float32 on a CPU without instructions for it; the kernels
widen it once and are as fast as in float32.
"""

from __future__ import annotations

import torch

from epd.engine.native import Kernels
from epd.engine.packing import pack_panels

__all__ = ["PanelLinear", "use_panels"]


class PanelLinear(torch.nn.Module):
    """A linear layer for inference, with its weight in panels."""

    def __init__(self, linear: torch.nn.Linear, kernels: Kernels) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._kernels = kernels
        self._panels = pack_panels(linear.weight.detach())
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out_features]`` for ``[..., in_features]``."""
        rows = inputs.reshape(-1, self.in_features).contiguous()
        result = self._kernels.linear(rows, self._panels, self.out_features, self._bias)
        return result.to(inputs.dtype).view(*inputs.shape[:-1], self.out_features)


def use_panels(module: torch.nn.Module, kernels: Kernels) -> None:
    """Replace every linear layer below ``module`` whose inputs pair up, in place; the plain weights are dropped."""
    for name, child in list(module.named_children()):
        if isinstance(child, torch.nn.Linear) and child.in_features % 2 == 0:
            setattr(module, name, PanelLinear(child, kernels))
        else:
            use_panels(child, kernels)
