"""The engine's CPU kernels: attention over block tables, and a decoder's layers as one call.

Owns the way from tensors to addresses; the arithmetic is in the C++ files beside this one, which ``build`` compiles on
first use. A machine without a C++ compiler goes without (``load_kernels`` says why), and torch's own kernels do the
work. Knows nothing of engines or requests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from epd.cache.kv_cache import KVCache
from epd.engine.native.build import has_compiler, load_library

__all__ = [
    "DecoderShape",
    "Kernels",
    "LayerWeights",
    "NativeDecoder",
    "NativeStep",
    "has_compiler",
    "load_kernels",
]

MAX_HEAD_DIM = 512
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def ctypes_fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Return fields of one kind for a ``ctypes.Structure``."""
    return tuple((name, kind) for name in names.split())


class _Chunk(ctypes.Structure):
    _fields_ = (*ctypes_fields(ctypes.c_int64, "first_row num_tokens context_len"), ("table", ctypes.c_void_p))


class _Step(ctypes.Structure):
    _fields_ = (
        ("kv", ctypes.c_void_p),
        *ctypes_fields(ctypes.c_int64, "block_stride layer_stride side_stride token_stride block_size"),
        *ctypes_fields(ctypes.c_void_p, "slot_blocks slot_offsets"),
        *ctypes_fields(ctypes.c_int64, "num_tokens num_decodes"),
        *ctypes_fields(ctypes.c_void_p, "decode_tables decode_lens"),
        *ctypes_fields(ctypes.c_int64, "max_blocks num_chunks"),
        ("chunks", ctypes.c_void_p),
        ("num_threads", ctypes.c_int64),
    )


class _Heads(ctypes.Structure):
    _fields_ = (*ctypes_fields(ctypes.c_int64, "num_heads num_kv_heads head_dim"), ("scale", ctypes.c_float))


class _Layer(ctypes.Structure):
    _fields_ = ctypes_fields(
        ctypes.c_void_p, "input_norm qkv qkv_bias query_norm key_norm output output_bias post_norm gate_up down"
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        *ctypes_fields(ctypes.c_void_p, "layers final_norm"),
        *ctypes_fields(ctypes.c_int64, "num_layers hidden_size intermediate_size num_heads num_kv_heads head_dim"),
        *ctypes_fields(ctypes.c_float, "epsilon scale"),
    )


@dataclass(frozen=True, slots=True)
class NativeStep:
    """One step's batch as the kernels take it: addresses, and the tensors that they belong to."""

    kernels: Kernels
    arguments: _Step
    kept: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What a decoder's layers have in common. ``scale`` multiplies attention scores."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    scale: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, its matrices packed by ``epd.engine.packing.pack_panels``: ``qkv`` stacks the rows of three, and
    ``gate_up`` alternates 16 rows of each. ``query_norm`` and ``key_norm`` are ``[head_dim]``."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None


class NativeDecoder:
    """The layers of one decoder, addressed once."""

    def __init__(self, kernels: Kernels, shape: DecoderShape, layers: Sequence[LayerWeights], norm: torch.Tensor):
        self.layers = tuple(layers)
        self._kernels, self._shape, self._norm = kernels, shape, norm
        self._addresses = (_Layer * len(layers))(*(_layer_addresses(layer) for layer in layers))
        self._arguments = _Decoder(
            layers=ctypes.addressof(self._addresses),
            final_norm=norm.data_ptr(),
            num_layers=len(layers),
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            epsilon=shape.epsilon,
            scale=shape.scale,
        )

    def __call__(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: NativeStep) -> torch.Tensor:
        """Run all layers and the final norm: contiguous ``[num_tokens, hidden_size]`` in and out.

        ``cos`` and ``sin`` are contiguous ``[num_tokens, head_dim]``. K and V go to the step's slots.
        """
        assert all(tensor.is_contiguous() for tensor in (hidden, cos, sin))
        assert hidden.shape[0] == step.arguments.num_tokens == cos.shape[0] == sin.shape[0]
        out = torch.empty_like(hidden)
        self._kernels.run_decoder(
            ctypes.byref(self._arguments),
            ctypes.byref(step.arguments),
            hidden.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
        )
        return out


class Kernels:
    """The kernels for one element type. Called without the GIL, on as many threads as torch has."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._attend = _function(library, "attend", dtype, [pointer, pointer, count, pointer, pointer])
        self.run_decoder = _function(library, "decoder", dtype, [pointer] * 6)
        self.run_tower_block = _function(library, "tower_block", dtype, [pointer] * 5)
        self._linear = _function(library, "linear", dtype, [pointer] * 4 + [count] * 4)

    def can_attend(self, head_dim: int) -> bool:
        """Whether heads of this size are dealt with. Inputs of half precision are multiplied in pairs."""
        return head_dim <= MAX_HEAD_DIM and head_dim % 2 == 0

    def plan_step(
        self,
        kv_cache: KVCache,
        slots: tuple[torch.Tensor, torch.Tensor],
        decodes: tuple[torch.Tensor, torch.Tensor],
        chunks: Sequence[tuple[int, int, int, torch.Tensor]],
    ) -> NativeStep:
        """Address one step. All index tensors are int64 and contiguous: ``slots`` are the blocks and offsets of new
        tokens, ``decodes`` the tables ``[num_decodes, max_blocks]`` and lengths, and ``chunks`` first rows, numbers of
        tokens, context lengths and tables."""
        blocks, (tables, lens) = kv_cache.blocks, decodes
        assert blocks.dtype is self.dtype
        addresses = (_Chunk * len(chunks))(*(_Chunk(*numbers, table.data_ptr()) for *numbers, table in chunks))
        arguments = _Step(
            kv=blocks.data_ptr(),
            block_stride=blocks.stride(0),
            layer_stride=blocks.stride(1),
            side_stride=blocks.stride(2),
            token_stride=blocks.stride(3),
            block_size=kv_cache.block_size,
            slot_blocks=slots[0].data_ptr(),
            slot_offsets=slots[1].data_ptr(),
            num_tokens=len(slots[0]),
            num_decodes=len(lens),
            decode_tables=tables.data_ptr(),
            decode_lens=lens.data_ptr(),
            max_blocks=tables.shape[1],
            num_chunks=len(chunks),
            chunks=ctypes.addressof(addresses),
            num_threads=torch.get_num_threads(),
        )
        return NativeStep(self, arguments, (kv_cache, slots, decodes, chunks, addresses))

    def attend(
        self, query: torch.Tensor, step: NativeStep, layer_idx: int, num_kv_heads: int, scale: float
    ) -> torch.Tensor:
        """Return attention ``[num_tokens, num_heads, head_dim]`` for a contiguous query of that shape."""
        assert query.is_contiguous()
        assert query.dtype is self.dtype
        out = torch.empty_like(query)
        heads = _Heads(query.shape[1], num_kv_heads, query.shape[2], scale)
        step_address = ctypes.byref(step.arguments)
        self._attend(query.data_ptr(), step_address, layer_idx, ctypes.byref(heads), out.data_ptr())
        return out

    def linear(
        self, inputs: torch.Tensor, panels: torch.Tensor, num_outputs: int, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return float32 ``[num_rows, num_outputs]``, rounded to the element type, for contiguous inputs
        ``[num_rows, num_inputs]``, a matrix packed by ``pack_panels``, and a bias ``[num_outputs]``."""
        assert inputs.is_contiguous()
        assert inputs.dtype is panels.dtype is self.dtype
        assert bias is None or (bias.dtype is self.dtype and bias.is_contiguous())
        out = torch.empty(len(inputs), num_outputs, dtype=torch.float32)
        addresses = (inputs.data_ptr(), panels.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr())
        self._linear(*addresses, *inputs.shape, num_outputs, torch.get_num_threads())
        return out


@cache
def load_kernels(dtype: torch.dtype) -> Kernels | None:
    """Return the kernels for an element type, built if need be; ``None``, with a log line, where there are none."""
    if dtype not in _SUFFIXES:
        return None
    library = load_library()
    return None if library is None else Kernels(library, dtype)


def _function(library: ctypes.CDLL, name: str, dtype: torch.dtype, argtypes: list[Any]) -> Any:
    function = getattr(library, f"epd_{name}_{_SUFFIXES[dtype]}")
    function.restype, function.argtypes = None, argtypes
    return function


def _layer_addresses(layer: LayerWeights) -> _Layer:
    tensors = {name: getattr(layer, name) for name, _ in _Layer._fields_}
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors.values())
    return _Layer(**{name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()})
