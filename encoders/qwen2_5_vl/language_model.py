"""The language model of Qwen2.5-VL alone: the decoder layers of ``transformers`` over a packed batch.

They run unchanged, or, for an attention that comes with kernels of ours, as one call over the same weights. Knows
nothing of images, nor of where keys and values are kept: the cache and the attention batch pass through.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding, Qwen2_5_VLTextModel

from encoders.checkpoint import load_parts, read_json, weight_bytes
from epd.engine.attention import ATTENTION, register_attention
from epd.engine.fused import FusedDecoder, can_fuse
from epd.engine.native import NativeStep
from epd.engine.packing import PackedLinear, can_pack, pack_linears
from epd.types import KVSpec

_TEXT_PREFIXES = {"model.language_model.": "", "model.": ""}
_HEAD_PREFIXES = {"lm_head.": ""}


class Qwen2_5_VLLanguageModel:
    """A decoder-only model over a paged KV cache; implements ``LanguageModel``."""

    def __init__(self, directory: Path, *, dtype: str, device: str = "cpu") -> None:
        """Read the language model's weights, and no others. Raises ``ConfigError`` if the checkpoint lacks some."""
        register_attention()
        torch_dtype: torch.dtype = getattr(torch, dtype)
        config = Qwen2_5_VLConfig.from_pretrained(directory)
        text = config.text_config
        text._attn_implementation = ATTENTION
        with torch.device("meta"):
            self._model = Qwen2_5_VLTextModel(text)
            head = torch.nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self._model.rotary_emb = Qwen2_5_VLRotaryEmbedding(text)
        load_parts(self._model, directory, _TEXT_PREFIXES, dtype=torch_dtype, device=device)
        if config.tie_word_embeddings:
            head.weight = self._model.embed_tokens.weight
        else:
            load_parts(head, directory, _HEAD_PREFIXES, dtype=torch_dtype, device=device)
        self.weight_bytes = weight_bytes(self._model, head)
        self._head: torch.nn.Module = head
        self._is_packable = can_pack(torch_dtype, device)
        self._fused: FusedDecoder | None = None
        if device == "cpu" and can_fuse(self._model, head):
            self._fused = FusedDecoder(self._model, head, text.num_key_value_heads)
        self.hidden_size: int = text.hidden_size
        self.vocab_size: int = text.vocab_size
        self.eos_token_ids = _eos_token_ids(directory, config)
        self.kv_spec = KVSpec(
            num_layers=text.num_hidden_layers,
            num_kv_heads=text.num_key_value_heads,
            head_dim=text.hidden_size // text.num_attention_heads,
            dtype=dtype,
            itemsize_bytes=torch_dtype.itemsize,
        )

    @torch.no_grad()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, hidden_size]`` for int64 ``[num_tokens]``."""
        return F.embedding(token_ids, self._model.embed_tokens.weight)

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, cache: Any, attention: Any) -> torch.Tensor:
        """Run all layers over a packed batch: ``[num_tokens, hidden_size]`` in and out (after the final norm).

        ``positions`` is int64 ``[3, num_tokens]``. The layers hand keys and values to ``cache.update`` and call the
        registered attention function with ``paged=attention``; unless ``attention`` has a ``native_step``, which they
        then are given as a whole. The first call packs the weights for whichever way it goes.
        """
        states = hidden[None]
        cos, sin = self._model.rotary_emb(states, positions[:, None])
        step: NativeStep | None = attention.native_step() if hasattr(attention, "native_step") else None
        if step is not None and self._fused is not None:
            if not self._fused.is_active:
                self._fused.take_weights(step.kernels)
            return self._fused.forward(hidden, cos[0], sin[0], step)
        self._prepare_modules()
        for layer in self._model.layers:
            states = layer(
                states,
                attention_mask=None,
                cache=cache,
                use_cache=True,
                position_embeddings=(cos, sin),
                paged=attention,
            )
        normalized: torch.Tensor = self._model.norm(states)[0]
        return normalized

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[num_rows, vocab_size]`` for ``[num_rows, hidden_size]``."""
        if self._fused is not None and self._fused.is_active:
            return self._fused.logits(hidden)
        logits: torch.Tensor = self._head(hidden)
        return logits.float()

    def _prepare_modules(self) -> None:
        """Have the weights where transformers' layers use them, packed for oneDNN where that helps."""
        if self._fused is not None and self._fused.is_active:
            self._fused.give_weights_back()
        if self._is_packable:
            pack_linears(self._model)
            assert isinstance(self._head, torch.nn.Linear)
            self._head = PackedLinear(self._head)
            self._is_packable, self._fused = False, None  # what oneDNN packed cannot be read back


def _eos_token_ids(directory: Path, config: Any) -> frozenset[int]:
    """Return the tokens that end an output: as ``generate`` takes them, or the model's configuration if it has none."""
    generation = read_json(directory / "generation_config.json", required=False)
    eos = generation.get("eos_token_id", config.text_config.eos_token_id)
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, list) else frozenset([eos])
