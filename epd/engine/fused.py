"""The decoder of a Llama-like model of ``transformers`` as one kernel call a step, over the same weights.

Some 600 small operations a step cost more than they compute, so on the CPU whole layers run in ``epd.engine.native``.
Owns where the weights are: in the model's modules, where transformers' own layers use them, or packed for the kernels;
never in both. Knows nothing of batches, nor of what rotary positions mean.
"""

from __future__ import annotations

from typing import Any

import torch

from epd.engine.native import DecoderShape, Kernels, LayerWeights, NativeDecoder, NativeStep
from epd.engine.packing import interleave, pack_panels, separate, unpack_panels


class FusedDecoder:
    """Runs the layers of ``model`` (which has ``layers`` and ``norm``) and ``head``, once weights were moved here.

    Layers are taken to be pre-norm, with grouped-query attention under full rotary positions and a SiLU-gated MLP;
    biases of the attention's projections and norms of queries and keys are optional. ``can_fuse`` says whether they
    are.
    """

    def __init__(self, model: Any, head: torch.nn.Linear, num_kv_heads: int) -> None:
        self._model, self._head = model, head
        self._num_kv_heads = num_kv_heads
        self._decoder: NativeDecoder | None = None
        self._kernels: Kernels | None = None
        self._head_panels: torch.Tensor | None = None

    @property
    def is_active(self) -> bool:
        """Whether the weights are here, and not in the modules."""
        return self._decoder is not None

    def take_weights(self, kernels: Kernels) -> None:
        """Pack the weights for ``kernels``, and leave the modules without. The head's stay: they may be embeddings."""
        attention = self._model.layers[0].self_attn
        shape = DecoderShape(
            hidden_size=self._head.in_features,
            intermediate_size=self._model.layers[0].mlp.gate_proj.out_features,
            num_heads=attention.q_proj.out_features // attention.head_dim,
            num_kv_heads=self._num_kv_heads,
            head_dim=attention.head_dim,
            epsilon=_epsilon(self._model.norm),
            scale=attention.scaling,
        )
        layers = [_take_layer(layer) for layer in self._model.layers]
        self._decoder = NativeDecoder(kernels, shape, layers, self._model.norm.weight)
        self._kernels, self._head_panels = kernels, pack_panels(self._head.weight.detach())

    def give_weights_back(self) -> None:
        """Put the weights where transformers' layers look for them."""
        assert self._decoder is not None
        for layer, weights in zip(self._model.layers, self._decoder.layers, strict=True):
            _restore_layer(layer, weights)
        self._decoder = self._kernels = self._head_panels = None

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: NativeStep) -> torch.Tensor:
        """Run all layers and the final norm: ``[num_tokens, hidden_size]`` in and out. ``cos`` and ``sin`` are
        ``[num_tokens, head_dim]``, in the model's element type."""
        assert self._decoder is not None
        return self._decoder(hidden.contiguous(), cos.contiguous(), sin.contiguous(), step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[num_rows, vocab_size]`` for ``[num_rows, hidden_size]``."""
        assert self._kernels is not None
        assert self._head_panels is not None
        return self._kernels.linear(hidden.contiguous(), self._head_panels, self._head.out_features)


KINDS = frozenset(
    f"{family}DecoderLayer" for family in ("Llama", "Qwen2", "Qwen2VL", "Qwen2_5_VL", "Qwen3", "Qwen3VLText")
)
"""Layers of ``transformers`` whose arithmetic is known to be that of ``FusedDecoder``. A list, because what else a
layer does (multipliers, other norms, windows) cannot be seen from its parts."""


def can_fuse(model: Any, head: torch.nn.Linear) -> bool:
    """Whether all layers of a model of ``transformers`` are of the kind that ``FusedDecoder`` computes."""
    return head.bias is None and all(type(layer).__name__ in KINDS and _is_fusable(layer) for layer in model.layers)


def _is_fusable(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    gated = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return (
        all(type(linear) is torch.nn.Linear and linear.in_features % 2 == 0 for linear in linears + gated)
        and all(linear.bias is None for linear in gated)
        and is_silu(mlp.act_fn)
        and getattr(attention, "sliding_window", None) is None
        and attention.head_dim % 2 == 0
        and attention.o_proj.in_features == attention.q_proj.out_features
    )


def is_silu(activation: torch.nn.Module) -> bool:
    """Whether an activation is SiLU, as torch's module or as that of ``transformers``."""
    from transformers.activations import ACT2FN

    return isinstance(activation, torch.nn.SiLU | type(ACT2FN["silu"]))


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon)


def _take_layer(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
    weights = LayerWeights(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=pack_panels(torch.cat([linear.weight.detach() for linear in inputs])),
        output=pack_panels(attention.o_proj.weight.detach()),
        post_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=pack_panels(interleave(mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach())),
        down=pack_panels(mlp.down_proj.weight.detach()),
        qkv_bias=None if inputs[0].bias is None else torch.cat([linear.bias.detach() for linear in inputs]),
        output_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.detach(),
        query_norm=_head_norm(attention, "q_norm"),
        key_norm=_head_norm(attention, "k_norm"),
    )
    for linear in (*inputs, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        _set_weight(linear, linear.weight.new_empty(0))
    return weights


def _head_norm(attention: Any, name: str) -> torch.Tensor | None:
    norm = getattr(attention, name, None)
    return None if norm is None else norm.weight.detach()


def _restore_layer(layer: Any, weights: LayerWeights) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
    sizes = [linear.out_features for linear in inputs]
    for linear, weight in zip(inputs, torch.split(unpack_panels(weights.qkv, sum(sizes)), sizes), strict=True):
        _set_weight(linear, weight.clone())
    _set_weight(attention.o_proj, unpack_panels(weights.output, attention.o_proj.out_features))
    both = unpack_panels(weights.gate_up, weights.gate_up.shape[0] * weights.gate_up.shape[2])
    gate, up = separate(both, mlp.gate_proj.out_features)
    _set_weight(mlp.gate_proj, gate)
    _set_weight(mlp.up_proj, up)
    _set_weight(mlp.down_proj, unpack_panels(weights.down, mlp.down_proj.out_features))


def _set_weight(linear: torch.nn.Linear, weight: torch.Tensor) -> None:
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
