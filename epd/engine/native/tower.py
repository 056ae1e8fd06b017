"""A block of a vision tower as one kernel call: from its weights and a batch of patches to addresses."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields

import torch

from epd.engine.native import Kernels, ctypes_fields

__all__ = ["BlockShape", "BlockWeights", "NativeBlock"]


class _Block(ctypes.Structure):
    _fields_ = (
        *ctypes_fields(ctypes.c_void_p, "first_norm qkv qkv_bias output output_bias second_norm"),
        *ctypes_fields(ctypes.c_void_p, "gate_up gate_up_bias down down_bias"),
        *ctypes_fields(ctypes.c_int64, "hidden_size intermediate_size num_heads head_dim"),
        *ctypes_fields(ctypes.c_float, "epsilon scale"),
    )


class _Segments(ctypes.Structure):
    _fields_ = (("starts", ctypes.c_void_p), *ctypes_fields(ctypes.c_int64, "num_segments num_rows num_threads"))


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Sizes of a block. ``scale`` multiplies attention scores."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    epsilon: float
    scale: float


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """A block's weights, the matrices packed by ``epd.engine.packing.pack_panels``: ``gate_up`` alternates 16 rows of
    each, and ``gate_up_bias`` is one bias after the other."""

    first_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    output: torch.Tensor
    output_bias: torch.Tensor
    second_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor


class NativeBlock:
    """Pre-norm, full rotary positions in float32, attention within segments, a SiLU-gated MLP."""

    def __init__(self, kernels: Kernels, shape: BlockShape, weights: BlockWeights) -> None:
        self._kernels, self._weights = kernels, weights
        tensors = {field.name: getattr(weights, field.name) for field in fields(weights)}
        assert all(tensor.is_contiguous() and tensor.dtype is kernels.dtype for tensor in tensors.values())
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        sizes = {field.name: getattr(shape, field.name) for field in fields(shape)}
        self._arguments = _Block(**addresses, **sizes)

    def __call__(self, hidden: torch.Tensor, starts: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Change ``hidden``, contiguous ``[num_rows, hidden_size]``, in place.

        Rows from one of ``starts`` (int64, the last is ``num_rows``) to the next attend to each other. ``cos`` and
        ``sin`` are contiguous float32 ``[num_rows, head_dim]``.
        """
        assert hidden.dtype is self._kernels.dtype
        assert cos.dtype is sin.dtype is torch.float32
        assert starts.dtype is torch.int64
        assert all(tensor.is_contiguous() for tensor in (hidden, starts, cos, sin))
        assert len(cos) == len(sin) == len(hidden)
        segments = _Segments(starts.data_ptr(), len(starts) - 1, len(hidden), torch.get_num_threads())
        self._kernels.run_tower_block(
            ctypes.byref(self._arguments),
            ctypes.byref(segments),
            hidden.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
        )
