"""Tokenizers trained in milliseconds, for tests of prompts and text that need no model.

One byte-level as in Qwen, with its control tokens and chat template; one of words and byte tokens as in Llama 2.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.tiny_checkpoints import CHAT_TEMPLATE, SPECIAL_TOKENS

_CORPUS = (
    "system user assistant You are a helpful assistant.",
    "What is in the image? Describe the picture and the shapes in it.",
    "Ein Bär läuft über die Straße. Où est la bibliothèque? 你好世界 🎉",
    "im start end vision pad image video object tool call",
)


@functools.cache
def byte_level_tokenizer() -> Any:
    """A byte-level tokenizer with Qwen's control tokens, a tool-call token that is not special, and a chat template."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        _CORPUS * 4, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("grüße ", normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


@functools.cache
def word_tokenizer() -> Any:
    """A tokenizer whose text is not the sum of its tokens' bytes: word starts are marked, rare characters are bytes."""
    from transformers import PreTrainedTokenizerFast

    specials = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*specials, *byte_tokens], show_progress=False)
    tokenizer.train_from_iterator(_CORPUS[:2] * 4, trainer)
    # Byte tokens had to be reserved by the trainer, but they are not special.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in specials]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] | trim }}</s>{% endfor %}"
    return fast


def write_prompt_checkpoint(directory: Path) -> Path:
    """Write what a checkpoint directory holds about prompts: tokenizer, template, and placeholder ids."""
    fast = byte_level_tokenizer()
    fast.save_pretrained(directory)
    ids = {f"{modality}_token_id": fast.convert_tokens_to_ids(f"<|{modality}_pad|>") for modality in ("image", "video")}
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", **ids}))
    return directory
