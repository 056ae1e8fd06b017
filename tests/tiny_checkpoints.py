"""Checkpoints small enough to build in every test run: real architectures, random weights, a trained tokenizer.

A checkpoint is a directory that `transformers` loads with `from_pretrained`, so that the same files feed the system
under test and the reference it is compared with. Weights are drawn wide: greedy outputs vary with the prompt and the
pixels instead of repeating one token. Special tokens are never the most likely, so that outputs run to their length.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part['type'] == 'video' or 'video' in part or 'video_url' in part %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{ part['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}
"""  # noqa: E501

# How Qwen2 splits text before byte-pair encoding.
_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_CORPUS = (
    "system\nYou are a helpful assistant. user\nassistant\n",
    "What is in the image? Describe the picture, and say what color the shapes are.",
    "How many shapes are there in the video? Which image shows a red circle or a blue square?",
    "Count from one to ten: one, two, three, four, five, six, seven, eight, nine, ten.",
    "The quick brown fox jumps over the lazy dog, and the green bird sings in the tree.",
)


def make_tiny_qwen2_5_vl(
    path: Path | str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    text_config: Mapping[str, Any] | None = None,
    vision_config: Mapping[str, Any] | None = None,
    image_processor: Mapping[str, Any] | None = None,
    tie_word_embeddings: bool = True,
    max_shard_size: str = "1GB",
) -> Path:
    """Write a random Qwen2.5-VL of some 200 thousand parameters to ``path``; return ``path``.

    Three text layers with grouped queries and M-RoPE; two vision blocks, one over windows of 56 pixels and one over the
    whole image. ``text_config``, ``vision_config`` and ``image_processor`` override single fields.
    """
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    token_ids, vocab_size = _write_tokenizer(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(_image_processor(image_processor or {}), indent=2))
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.15,
            "tie_word_embeddings": tie_word_embeddings,
            "bos_token_id": token_ids["<|endoftext|>"],
            "eos_token_id": token_ids["<|im_end|>"],
            "pad_token_id": token_ids["<|endoftext|>"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            **(text_config or {}),
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
            "initializer_range": 0.15,
            **(vision_config or {}),
        },
        image_token_id=token_ids["<|image_pad|>"],
        video_token_id=token_ids["<|video_pad|>"],
        vision_start_token_id=token_ids["<|vision_start|>"],
        vision_end_token_id=token_ids["<|vision_end|>"],
        vision_token_id=token_ids["<|vision_pad|>"],
        tie_word_embeddings=tie_word_embeddings,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=2.0 * parameter[0].numel() ** -0.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
        model.get_input_embeddings().weight.normal_(std=0.25)
        model.get_output_embeddings().weight[list(token_ids.values())] = 0.0
    model = model.to(getattr(torch, dtype))
    model.generation_config.eos_token_id = token_ids["<|im_end|>"]
    model.generation_config.pad_token_id = token_ids["<|endoftext|>"]
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


@functools.cache
def tiny_qwen2_5_vl(seed: int = 0, dtype: str = "float32") -> Path:
    """Return a tiny Qwen2.5-VL in a temporary directory, built once per process and removed at its end."""
    holder = _temporary_directory()
    return make_tiny_qwen2_5_vl(Path(holder.name) / f"tiny-{seed}-{dtype}", seed=seed, dtype=dtype)


@functools.cache
def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-checkpoints-")


def _image_processor(overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
        "merge_size": 2,
        "patch_size": 14,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64},
        "temporal_patch_size": 2,
        **overrides,
    }


def _write_tokenizer(directory: Path) -> tuple[dict[str, int], int]:
    """Train a byte-level tokenizer and write it with the chat template; return ids of special tokens, and its size."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=2048,
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in ("<|im_end|>", "<|endoftext|>")],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    return ids, tokenizer.get_vocab_size()
