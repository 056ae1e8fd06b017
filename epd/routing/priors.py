"""Cost-model parameters guessed from a model's shapes and a device's peak figures, for a deployment without a profile.

Owns the arithmetic from parameters and bytes to seconds. Knows nothing of checkpoints on disk: it reads the parsed
``config.json``. Guesses get the order of magnitude and the *shape* right (what is linear, what is quadratic, what a
split costs in bytes); the online correction finds the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from epd.routing.cost_model import (
    CostModel,
    CostSource,
    DecodeCost,
    DecodeRegime,
    EncodeCost,
    PrefillCost,
    PreprocessCost,
    ProfileKey,
    TransferCost,
)

ITEMSIZE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """The numbers of a model that its cost depends on. Parameter counts are those *used* for one token or patch."""

    num_language_params: int
    num_layers: int
    hidden_size: int
    num_vision_params: int
    num_full_attention_vision_layers: int
    vision_hidden_size: int
    kv_bytes_per_token: int
    embedding_bytes_per_token: int
    itemsize_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceGuess:
    """What a device is expected to reach in practice, not its data sheet."""

    flops_per_s: float
    bytes_per_s: float
    layer_overhead_s: float
    preprocess_fixed_s: float
    preprocess_per_patch_s: float
    transfer_fixed_s: float
    transfer_bytes_per_s: float


def guess_device(device: str, dtype: str, num_threads: int = 1) -> DeviceGuess:
    """Return a guess for ``cpu`` (per thread; bfloat16 assumes AMX) or for a data-centre GPU of the H100 class."""
    if device.startswith("cuda"):
        return DeviceGuess(
            flops_per_s=0.6 * (989e12 if dtype != "float32" else 67e12),
            bytes_per_s=0.7 * 4.8e12,
            layer_overhead_s=50e-6,
            preprocess_fixed_s=2e-3,
            preprocess_per_patch_s=1e-5,
            transfer_fixed_s=1e-3,
            transfer_bytes_per_s=20e9,
        )
    return DeviceGuess(
        flops_per_s=num_threads * (1.36e12 if dtype == "bfloat16" else 0.22e12) * 0.7,
        bytes_per_s=15e9,
        layer_overhead_s=400e-6,
        preprocess_fixed_s=2e-3,
        preprocess_per_patch_s=1e-5,
        transfer_fixed_s=3e-3,
        transfer_bytes_per_s=1.2e9,
    )


def shapes_from_config(config: Mapping[str, Any], dtype: str) -> ModelShapes:
    """Read shapes from a parsed ``config.json`` in the names that ``transformers`` uses; absent numbers count as 0."""
    text: Mapping[str, Any] = config.get("text_config") or config
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    itemsize = ITEMSIZE_BYTES[dtype]
    hidden = int(text.get("hidden_size", 0))
    num_layers = int(text.get("num_hidden_layers", 0))
    num_heads = int(text.get("num_attention_heads", 1))
    num_kv_heads = int(text.get("num_key_value_heads") or num_heads)
    head_dim = int(text.get("head_dim") or hidden // num_heads)
    attention = hidden * head_dim * (2 * num_heads + 2 * num_kv_heads)
    # A mixture of experts runs only some of its experts for a token.
    experts_used = int(text.get("num_experts_per_tok") or 0)
    width = experts_used * int(text.get("moe_intermediate_size") or 0) or int(text.get("intermediate_size", 0))
    vision_hidden = int(vision.get("hidden_size") or vision.get("embed_dim") or 0)
    vision_depth = int(vision.get("depth") or vision.get("num_hidden_layers") or 0)
    vision_width = int(vision.get("intermediate_size") or 4 * vision_hidden)
    full_attention = vision.get("fullatt_block_indexes")
    extra_levels = len(vision.get("deepstack_visual_indexes") or ())
    return ModelShapes(
        num_language_params=num_layers * (attention + 3 * hidden * width) + hidden * int(text.get("vocab_size", 0)),
        num_layers=num_layers,
        hidden_size=hidden,
        num_vision_params=vision_depth * (4 * vision_hidden**2 + 3 * vision_hidden * vision_width),
        num_full_attention_vision_layers=vision_depth if full_attention is None else len(full_attention),
        vision_hidden_size=vision_hidden,
        kv_bytes_per_token=2 * num_layers * num_kv_heads * head_dim * itemsize,
        embedding_bytes_per_token=hidden * itemsize * (1 + extra_levels),
        itemsize_bytes=itemsize,
    )


def priors_from_shapes(key: ProfileKey, shapes: ModelShapes, device: DeviceGuess) -> CostModel:
    """Guess all parameters: compute-bound encode and prefill, memory-bound decode, linear transfers."""
    flops, bandwidth = device.flops_per_s, device.bytes_per_s
    weights_s = shapes.num_language_params * shapes.itemsize_bytes / bandwidth
    overhead_s = device.layer_overhead_s * max(1, shapes.num_layers)
    regime = DecodeRegime(
        fixed_s=overhead_s + weights_s,
        per_context_token_s=shapes.kv_bytes_per_token / bandwidth,
        per_sequence_s=2 * shapes.num_language_params / flops,
    )
    transfer = TransferCost(device.transfer_fixed_s, 1 / device.transfer_bytes_per_s)
    return CostModel(
        key=key,
        source=CostSource.PRIORS,
        preprocess=PreprocessCost(device.preprocess_fixed_s, device.preprocess_per_patch_s),
        encode=EncodeCost(
            fixed_s=overhead_s,
            per_patch_s=2 * shapes.num_vision_params / flops,
            # Q K^T and A V over every pair of patches: 4 n^2 h a layer.
            per_patch_squared_s=4 * shapes.num_full_attention_vision_layers * shapes.vision_hidden_size / flops,
        ),
        prefill=PrefillCost(
            fixed_s=overhead_s,
            per_token_s=2 * shapes.num_language_params / flops,
            # The same, over the causal half of the pairs.
            per_token_squared_s=2 * shapes.num_layers * shapes.hidden_size / flops,
        ),
        decode=DecodeCost(small=regime, large=regime, large_from_sequences=64),
        embedding_transfer=transfer,
        kv_transfer=transfer,
        embedding_bytes_per_token=float(shapes.embedding_bytes_per_token),
        kv_bytes_per_token=float(shapes.kv_bytes_per_token),
    )
