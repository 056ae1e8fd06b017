"""Weights of linear layers in the layouts that matrix kernels read best: oneDNN's, and panels for ours.

On the CPU a step of few tokens is bound by reading weights, and from the plain layout they are read at half of memory's
speed. Packing for oneDNN changes no result: the same kernel reads the same numbers. Panels are what
``epd.engine.native`` multiplies by. Knows nothing of models.
"""

from __future__ import annotations

import torch

_TYPICAL_ROWS = 16
"""Rows that the layout is chosen for. Measured: the choice hardly matters between 1 and 1,024."""


PANEL = 32
"""Outputs of a panel."""


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


def pack_panels(weight: torch.Tensor) -> torch.Tensor:
    """Return ``[num_outputs, num_inputs]`` as panels of ``PANEL`` outputs, inputs outermost in each.

    ``[num_panels, num_inputs, PANEL]`` in float32; in half precision inputs go in pairs, ``[num_panels,
    num_inputs / 2, PANEL, 2]``, so their number must be even. The last panel is filled with zeros.
    """
    num_outputs, num_inputs = weight.shape
    num_panels = -(-num_outputs // PANEL)
    padded = weight.new_zeros(num_panels * PANEL, num_inputs)
    padded[:num_outputs] = weight
    tuple_size = 4 // weight.itemsize
    panels = padded.view(num_panels, PANEL, num_inputs // tuple_size, tuple_size).transpose(1, 2).contiguous()
    return panels.squeeze(-1) if tuple_size == 1 else panels


def unpack_panels(panels: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """Return the matrix ``[num_outputs, num_inputs]`` that was packed."""
    if panels.ndim == 3:
        panels = panels.unsqueeze(-1)
    num_panels, num_tuples, _, tuple_size = panels.shape
    plain = panels.transpose(1, 2).reshape(num_panels * PANEL, num_tuples * tuple_size)
    return plain[:num_outputs].contiguous()


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Alternate half a panel's rows of two matrices ``[num_outputs, num_inputs]``, each filled up with zeros."""
    half = PANEL // 2
    num_outputs, num_inputs = gate.shape
    num_groups = -(-num_outputs // half)
    both = gate.new_zeros(2, num_groups * half, num_inputs)
    both[0, :num_outputs], both[1, :num_outputs] = gate, up
    return both.view(2, num_groups, half, num_inputs).transpose(0, 1).reshape(-1, num_inputs)


def separate(both: torch.Tensor, num_outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two matrices that were interleaved."""
    half, num_inputs = PANEL // 2, both.shape[1]
    gate, up = both.view(-1, 2, half, num_inputs).transpose(0, 1).reshape(2, -1, num_inputs)[:, :num_outputs]
    return gate.contiguous(), up.contiguous()
