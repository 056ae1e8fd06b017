"""Weights of linear layers in the layout that oneDNN's matrix kernels read best.

In half precision on the CPU a step of few tokens is bound by reading weights, and from the plain layout they are read
at half of memory's speed. Packing once, at load, changes no result: the same kernel reads the same numbers. Knows
nothing of models.
"""

from __future__ import annotations

import torch

_TYPICAL_ROWS = 16
"""Rows that the layout is chosen for. Measured: the choice hardly matters between 1 and 1,024."""


class PackedLinear(torch.nn.Module):
    """``torch.nn.Linear`` for inference, with its weight packed."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        # Plain attributes: packed tensors are opaque, and nothing may move or cast them as it does parameters.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TYPICAL_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out_features]`` for ``[..., in_features]``."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self._bias, "none", [], "")
        return result


def can_pack(dtype: torch.dtype, device: str) -> bool:
    """Whether packing helps: half precision, on a CPU whose matrix kernels take it."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def pack_linears(module: torch.nn.Module) -> None:
    """Replace every linear layer below ``module`` by a packed one, in place; the plain weights are dropped."""
    for name, child in list(module.named_children()):
        if isinstance(child, torch.nn.Linear):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)
