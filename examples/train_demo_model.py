"""Train the built-in model from nothing: a Qwen2.5-VL of 3.5 million parameters, in under an hour on two cores.

    python examples/train_demo_model.py my-demo-model
    python examples/evaluate_demo_model.py my-demo-model

This script owns the tokenizer, the configuration, the training rows and the optimization; `demo_scenes` owns what is
asked and drawn, and nothing here knows of the serving engine. Training has two phases:

1. **Vision.** The tower alone learns to say of every patch which shape covers it, whose centre it holds, and which
   digit's. Trained through answers only, it named colours but after a quarter of an hour still guessed at shapes.
2. **Answers.** The whole model learns to answer. Image tokens must also tell, half-way through the decoder, their row,
   column, image and how many shapes came before: what a question about places, numbers or several images looks up.

What makes it quick: small images (at most 25 tokens), one pass over an image for all its questions (`Row`), bfloat16
products with float32 weights, Muon for the matrices, and one process a core. Checkpoints are written every few minutes;
`--resume` goes on from them.

The weights in `encoders/demo_model` took 71 minutes on two cores that other work shared, while this script was being
written: 17 minutes through answers only (770 steps, of which the decoder's weights were kept), 7 of the vision phase
(900 steps, from nothing), and 47 of the answer phase (2,430 steps, the first 470 of them without the labels of image
tokens, all but the last 480 with fewer numbers; the learning rate fell three times: to zero at 1,495, and from half at
1,950 and at 2,430). A run of this script takes both phases from nothing, with 2,400 answer steps in place of what the
decoder had learned before; at 0.3 and 0.85 seconds a step, on quiet cores, that is about 40 minutes. Such a run as a
whole has not been measured. The accuracy of the shipped weights is in their model card.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import string
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import demo_scenes as scenes
import numpy as np
import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from demo_scenes import Task
from PIL import Image
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.vision_utils import get_vision_position_ids

PATCH_SIZE = 14
MERGE_SIZE = 2
MIN_PIXELS = 84 * 84
MAX_PIXELS = 140 * 140
"""Nine to 25 tokens an image: a larger image is scaled down, which is most of why so small a model is enough."""

VOCABULARY_SIZE = 1024
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
DEFAULT_SYSTEM_PROMPT = "You are a helpful assistant."
OTHER_SYSTEM_PROMPTS = (
    "You answer questions about images.",
    "Answer briefly.",
    "You are a helpful assistant that looks at pictures.",
    "Be concise.",
    "You are Qwen.",
)
# The split of text before byte-pair encoding in Qwen2: one digit a token, a space joined to the word that follows it.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part['type'] == 'video' or 'video' in part or 'video_url' in part %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part %}
{{- part['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

IGNORED = -100
PATCH_CLASSES = [1 + len(scenes.COLORS) * len(scenes.SHAPES)] * 2 + [1 + 10]
"""Classes of what covers a patch, of whose centre it holds, and of the digit whose centre it holds."""
TOKEN_CLASSES = [8, 8, 8, 1 + scenes.MAX_SHAPES, 1 + len(scenes.COLORS) * len(scenes.SHAPES)]
"""Classes of an image token's row, column, image, count so far, and shape."""
LABELLED_LAYERS = 2
"""How many decoder layers an image token has to tell what its labels ask; the others are left to the question."""


# --- tokenizer and configuration -------------------------------------------------------------------------------------


def pseudo_word(rng: random.Random) -> str:
    """Draw a word that no list holds, so that repeating is learned as copying and not as a vocabulary."""
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(scenes.WORDS)
    if kind < 0.6:
        return str(rng.randint(0, 9999))
    if kind < 0.7:
        return rng.choice(scenes.WORDS).capitalize()
    if kind < 0.85:
        return "".join(rng.choice(string.ascii_letters) for _ in range(rng.randint(1, 5)))
    return "".join(rng.choice("bcdfghklmnprstvw") + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))


def corpus(rng: random.Random) -> Iterator[str]:
    """Yield the text that the tokenizer learns its merges from: questions with answers, and the prompts."""
    for _ in range(2000):
        yield f"system\n{DEFAULT_SYSTEM_PROMPT} user\nassistant\n"
        for task in scenes.WORDINGS:
            example = scenes.make_example(task, rng, paraphrase=True)
            yield f"{example.question} {example.answer}"
        yield " ".join(rng.choices(scenes.WORDS, k=8))
    for prompt in OTHER_SYSTEM_PROMPTS:
        yield from [prompt] * 100


def train_tokenizer(directory: Path, seed: int) -> None:
    """Train a byte-level tokenizer on the corpus and write it, with the chat template, as transformers loads it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(random.Random(seed)), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in ("<|im_end|>", "<|endoftext|>")],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    image_processor = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessor",
        "merge_size": MERGE_SIZE,
        "patch_size": PATCH_SIZE,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "temporal_patch_size": 2,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(image_processor, indent=2) + "\n")


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    """Describe the model: a plain Qwen2.5-VL, whose vision blocks all see the whole image."""
    token_id = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    vision_depth, vision_width, width = 4, 160, 192
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 448,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "bos_token_id": token_id["<|endoftext|>"],
            "eos_token_id": token_id["<|im_end|>"],
            "pad_token_id": token_id["<|endoftext|>"],
            # A low base: the grid positions of an image are small numbers, and the last frequencies are theirs.
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 6, 6]},
        },
        vision_config={
            "depth": vision_depth,
            "hidden_size": vision_width,
            "intermediate_size": 384,
            "num_heads": 5,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": 2,
            "window_size": 112,
            "out_hidden_size": width,
            "fullatt_block_indexes": list(range(vision_depth)),
            "tokens_per_second": 2,
        },
        image_token_id=token_id["<|image_pad|>"],
        video_token_id=token_id["<|video_pad|>"],
        vision_start_token_id=token_id["<|vision_start|>"],
        vision_end_token_id=token_id["<|vision_end|>"],
        vision_token_id=token_id["<|vision_pad|>"],
        tie_word_embeddings=True,
    )


# --- data: rows that hold several questions about the same images ----------------------------------------------------


@dataclass(slots=True)
class Media:
    """An image or the frames of a clip, resized for the model: `[num_frames, height, width, 3]` uint8."""

    pixels: np.ndarray
    is_clip: bool = False
    labels: np.ndarray | None = None

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of merged patches."""
        factor = PATCH_SIZE * MERGE_SIZE
        return self.pixels.shape[1] // factor, self.pixels.shape[2] // factor

    @property
    def num_frames(self) -> int:
        """Temporal patches: one of an image, one for two frames of a clip."""
        return max(self.pixels.shape[0] // 2, 1)


def prepare(images: Sequence[Image.Image], *, is_clip: bool = False) -> Media:
    """Resize as `Qwen2VLImageProcessorPil` does; normalization follows on the whole batch."""
    width, height = images[0].size
    new_height, new_width = smart_resize(
        height, width, factor=PATCH_SIZE * MERGE_SIZE, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS
    )
    resized = [image.resize((new_width, new_height), Image.Resampling.BICUBIC) for image in images]
    return Media(np.stack([np.asarray(image) for image in resized]), is_clip)


def prepare_scene(scene: scenes.Scene) -> Media:
    """Draw a scene, and label its patches."""
    media = prepare([scenes.draw(scene)])
    media.labels = patch_labels(scene, media.grid)
    return media


def patch_labels(scene: scenes.Scene, grid: tuple[int, int]) -> np.ndarray:
    """Say of each patch, in the processor's order, what covers its middle, whose centre it holds, and which digit's.

    Returns `[num_patches, 3]` classes, zero for nothing.
    """
    rows, columns = grid[0] * MERGE_SIZE, grid[1] * MERGE_SIZE
    labels = np.zeros((rows, columns, 3), dtype=np.int64)
    x, y = (np.arange(columns) + 0.5) * scene.width / columns, (np.arange(rows)[:, None] + 0.5) * scene.height / rows
    for shape in scene.shapes:
        name = 1 + list(scenes.COLORS).index(shape.color) * len(scenes.SHAPES) + scenes.SHAPES.index(shape.kind)
        radius = shape.diameter / 2
        across, down = np.abs(x - shape.center_x), y - shape.center_y
        if shape.kind == "circle":
            covers = across**2 + down**2 <= radius**2
        elif shape.kind == "square":
            covers = (across <= radius) & (np.abs(down) <= radius)
        else:
            covers = (np.abs(down) <= radius) & (across <= (down + radius) / 2)
        labels[covers, 0] = name
        labels[int(shape.center_y / scene.height * rows), int(shape.center_x / scene.width * columns), 1] = name
    if scene.number is not None:
        row = int(scene.number.center_y / scene.height * rows)
        for digit, center_x in zip(scene.number.digits, scene.number.digit_centers_x, strict=True):
            labels[row, min(max(int(center_x / scene.width * columns), 0), columns - 1), 2] = 1 + int(digit)
    merged = labels.reshape(grid[0], MERGE_SIZE, grid[1], MERGE_SIZE, 3)
    return merged.transpose(0, 2, 1, 3, 4).reshape(-1, 3)


def token_labels(media: Media, index: int) -> np.ndarray:
    """Say of each merged token what a reader of the image has to know there: `[num_tokens, 5]` classes.

    They are its row, its column, the number of its image in the prompt (of a clip, of its second), how many shapes or
    digits have their centres in the image up to it, and the shape whose centre it holds.
    """
    rows, columns = media.grid
    labels = np.full((rows * columns, 5), IGNORED, dtype=np.int64)
    labels[:, 0] = np.minimum(np.repeat(np.arange(rows), columns), TOKEN_CLASSES[0] - 1)
    labels[:, 1] = np.minimum(np.tile(np.arange(columns), rows), TOKEN_CLASSES[1] - 1)
    labels[:, 2] = min(index, TOKEN_CLASSES[2] - 1)
    if media.labels is not None:
        merged = media.labels.reshape(rows * columns, MERGE_SIZE**2, 3)
        labels[:, 3] = np.cumsum((merged[:, :, 1:] > 0).sum(axis=(1, 2)))
        labels[:, 4] = merged[:, :, 1].max(axis=1)
    return labels


@dataclass(slots=True)
class Row:
    """One sequence: a shared prefix, and branches after it that see the prefix and themselves but not each other.

    So one pass over an image answers several questions, and every question sees what it would see alone: the same
    tokens before it, at the same positions.
    """

    token_ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    media: list[tuple[int, Media]] = field(default_factory=list)
    next_position: int = 0
    branch: int = 0

    def add_text(self, token_ids: Sequence[int], *, is_answer: bool = False) -> None:
        """Append tokens, which count in the loss if they are an answer."""
        # The loss of an answer grows with the square root of its length: long ones do not drown short ones.
        weight = len(token_ids) ** -0.5 if is_answer else 0.0
        start = self.next_position
        self.token_ids += token_ids
        self.labels += token_ids if is_answer else [IGNORED] * len(token_ids)
        self.weights += [weight] * len(token_ids)
        self.branches += [self.branch] * len(token_ids)
        self.positions += [(start + i,) * 3 for i in range(len(token_ids))]
        self.next_position += len(token_ids)

    def add_media(self, media: Media, pad_token_id: int) -> None:
        """Append placeholders of an image or clip at their three-dimensional positions (M-RoPE)."""
        rows, columns = media.grid
        # A clip's temporal patches are one second apart, at two positions a second; an image has only one.
        start = self.next_position
        positions = [
            (start + 2 * frame, start + row, start + column)
            for frame in range(media.num_frames)
            for row in range(rows)
            for column in range(columns)
        ]
        self.media.append((len(self.token_ids), media))
        self.token_ids += [pad_token_id] * len(positions)
        self.labels += [IGNORED] * len(positions)
        self.weights += [0.0] * len(positions)
        self.branches += [self.branch] * len(positions)
        self.positions += positions
        self.next_position += max(rows, columns)


class RowMaker:
    """Makes training rows: draws scenes, asks about them, and lays the tokens out as the chat template does."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._rng = random.Random(seed)
        backend = tokenizer.backend_tokenizer
        self._encode: Callable[[str], list[int]] = lru_cache(maxsize=65536)(
            lambda text: backend.encode(text, add_special_tokens=False).ids
        )
        self.image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.video_token_id = tokenizer.convert_tokens_to_ids("<|video_pad|>")
        self._kinds: dict[Callable[[], Row], float] = {
            self._scene_row: 0.30,
            self._number_row: 0.40,
            self._which_row: 0.10,
            self._clip_row: 0.07,
            self._text_row: 0.13,
        }

    def make_labelled_images(self, num_images: int) -> tuple[list[tuple[tuple[int, int], torch.Tensor]], torch.Tensor]:
        """Draw scenes and numbers, in groups of eight of one size, with what their patches show."""
        rng = self._rng
        patches, labels = [], []
        for _ in range(num_images // 8):
            size = scenes.random_size(rng)
            group = [
                prepare_scene(
                    (scenes.random_number_scene if rng.random() < 0.4 else scenes.random_scene)(rng, size=size)
                )
                for _ in range(8)
            ]
            pixels = np.stack([np.repeat(media.pixels, 2, axis=0) for media in group])
            patches.append((group[0].grid, patchify(torch.from_numpy(pixels))))
            labels += [media.labels for media in group if media.labels is not None]
        return patches, torch.from_numpy(np.concatenate(labels))

    def make(self, num_rows: int, max_tokens: int) -> list[Row]:
        """Draw rows of at most `max_tokens` tokens, in the same shares at every step so that workers keep pace."""
        shares = np.cumsum(list(self._kinds.values()))
        points = (np.arange(num_rows) + self._rng.random()) / num_rows * shares[-1]
        makers = list(self._kinds)
        return [self._make_row(makers[index], max_tokens) for index in np.searchsorted(shares, points)]

    def _make_row(self, make_row: Callable[[], Row], max_tokens: int) -> Row:
        while True:
            row = make_row()
            if len(row.token_ids) <= max_tokens:
                return row

    def _start(self) -> Row:
        row = Row()
        prompt = DEFAULT_SYSTEM_PROMPT if self._rng.random() < 0.88 else self._rng.choice(OTHER_SYSTEM_PROMPTS)
        row.add_text(self._encode(f"<|im_start|>system\n{prompt}<|im_end|>\n<|im_start|>user\n"))
        return row

    def _add_media(self, row: Row, media: Media) -> None:
        row.add_text(self._encode("<|vision_start|>"))
        row.add_media(media, self.video_token_id if media.is_clip else self.image_token_id)
        row.add_text(self._encode("<|vision_end|>"))

    def _add_answer(self, row: Row, answer: str) -> None:
        row.add_text(self._encode("<|im_end|>\n<|im_start|>assistant\n"))
        row.add_text(self._encode(f"{answer}<|im_end|>"), is_answer=True)

    def _branches(self, row: Row, asked: Sequence[tuple[str, str]]) -> Row:
        """Add each question in a branch of its own; some continue the conversation of the branch before."""
        start = row.next_position
        for index, (question, answer) in enumerate(asked):
            if index and self._rng.random() < 0.1:
                row.add_text(self._encode("\n<|im_start|>user\n"))
            else:
                row.branch += 1
                row.next_position = start
            row.add_text(self._encode(question))
            self._add_answer(row, answer)
        return row

    def _about(self, media: Sequence[Media], asked: Sequence[tuple[str, str]]) -> Row:
        row = self._start()
        if self._rng.random() < 0.1:  # the question before the images: one branch, because the images are behind it
            question, answer = self._rng.choice(asked)
            row.add_text(self._encode(question))
            for item in media:
                self._add_media(row, item)
            self._add_answer(row, answer)
            return row
        for item in media:
            self._add_media(row, item)
        return self._branches(row, asked)

    def _scene_row(self) -> Row:
        rng = self._rng
        scene = scenes.random_scene(rng)
        asked = [
            scenes.ask(task, scene, rng, paraphrase=True) for task in (*scenes.SCENE_TASKS, Task.PLACE, Task.COLOUR)
        ]
        unique = list(dict.fromkeys(item for item in asked if item is not None))
        rng.shuffle(unique)
        return self._about([prepare_scene(scene)], unique)

    def _number_row(self) -> Row:
        rng = self._rng
        scene = scenes.random_number_scene(rng)
        task = Task.READ if rng.random() < 0.93 else Task.DESCRIBE
        asked = scenes.ask(task, scene, rng, paraphrase=True)
        assert asked is not None
        return self._about([prepare_scene(scene)], [asked])

    def _which_row(self) -> Row:
        rng = self._rng
        which = scenes.random_which_scenes(rng)
        asked = dict.fromkeys(scenes.ask_which(which, rng, paraphrase=True) for _ in range(6))
        return self._about([prepare_scene(scene) for scene in which], list(asked))

    def _clip_row(self) -> Row:
        frames, answer = scenes.random_clip(self._rng)
        question = scenes.ask_clip(self._rng, paraphrase=True)
        return self._about([prepare(frames, is_clip=True)], [(question, answer)])

    def _text_row(self) -> Row:
        rng = self._rng
        row = self._start()
        asked: list[tuple[str, str]] = []
        for _ in range(3):
            asked.append(scenes.ask_count_from(rng, paraphrase=True))
            asked.append(scenes.ask_repeat(rng, paraphrase=True, random_word=pseudo_word))
        return self._branches(row, asked)


@dataclass(slots=True)
class Batch:
    """Rows padded to one length, as tensors; patches are grouped by grid because equal images attend in one call."""

    token_ids: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    patches: list[tuple[tuple[int, int], torch.Tensor]]
    patch_labels: torch.Tensor
    token_labels: torch.Tensor
    media_slots: torch.Tensor


def patchify(frames: torch.Tensor) -> torch.Tensor:
    """Turn `[num_images, 2, height, width, 3]` uint8 into normalized patches `[num_images, num_patches, 1176]`.

    The order is the image processor's: the four patches of a merged token follow each other.
    """
    num_images, num_frames, height, width, _ = frames.shape
    rows, columns = height // (PATCH_SIZE * MERGE_SIZE), width // (PATCH_SIZE * MERGE_SIZE)
    pixels = frames.to(torch.float32).div_(127.5).sub_(1.0)
    pixels = pixels.view(num_images, num_frames, rows, MERGE_SIZE, PATCH_SIZE, columns, MERGE_SIZE, PATCH_SIZE, 3)
    return pixels.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(num_images, rows * columns * MERGE_SIZE**2, -1)


def collate(rows: Sequence[Row], pad_token_id: int) -> Batch:
    """Pad rows, some of which hold media, into a batch."""
    num_rows, length = len(rows), max(len(row.token_ids) for row in rows)
    length = -(-length // 16) * 16
    token_ids = np.full((num_rows, length), pad_token_id, dtype=np.int64)
    labels = np.full((num_rows, length), IGNORED, dtype=np.int64)
    weights = np.zeros((num_rows, length), dtype=np.float32)
    positions = np.zeros((3, num_rows, length), dtype=np.int64)
    branches = np.full((num_rows, length), -1, dtype=np.int64)
    # By grid, for each image or second of a clip: two frames, labels of patches and of tokens, and the tokens' places.
    groups: dict[tuple[int, int], list[tuple[np.ndarray, ...]]] = defaultdict(list)
    for index, row in enumerate(rows):
        size = len(row.token_ids)
        token_ids[index, :size] = row.token_ids
        # A token is predicted at the position before it.
        labels[index, : size - 1] = row.labels[1:]
        weights[index, : size - 1] = row.weights[1:]
        positions[:, index, :size] = np.asarray(row.positions).T
        branches[index, :size] = row.branches
        for media_index, (start, media) in enumerate(row.media):
            frames = media.pixels if media.is_clip else np.repeat(media.pixels, 2, axis=0)
            num_tokens = math.prod(media.grid)
            for frame in range(media.num_frames):
                unlabelled = np.full((num_tokens * MERGE_SIZE**2, 3), IGNORED, dtype=np.int64)
                groups[media.grid].append(
                    (
                        frames[2 * frame : 2 * frame + 2],
                        unlabelled if media.labels is None else media.labels,
                        token_labels(media, frame if media.is_clip else media_index),
                        index * length + start + frame * num_tokens + np.arange(num_tokens),
                    )
                )
    branch = torch.from_numpy(branches)
    order = torch.arange(length)
    sees = (branch[:, None, :] == branch[:, :, None]) | (branch[:, None, :] == 0)
    mask = sees & (order[None, :] <= order[:, None])
    # A padded position sees itself, which keeps the softmax defined.
    mask |= torch.eye(length, dtype=torch.bool)
    patches = [
        (grid, patchify(torch.from_numpy(np.stack([item[0] for item in group])))) for grid, group in groups.items()
    ]
    labels_of_patches, labels_of_tokens, media_slots = (
        torch.from_numpy(np.concatenate([item[part] for group in groups.values() for item in group]))
        for part in (1, 2, 3)
    )
    return Batch(
        torch.from_numpy(token_ids),
        torch.from_numpy(labels),
        torch.from_numpy(weights),
        torch.from_numpy(positions),
        mask[:, None],
        patches,
        labels_of_patches,
        labels_of_tokens,
        media_slots,
    )


# --- model: the forward pass of transformers, with equal images in one call ------------------------------------------


class TrainingForward:
    """Computes the loss with the modules of a `Qwen2_5_VLForConditionalGeneration`.

    The vision tower of transformers attends image by image in a Python loop, and its decoder computes the logits of
    every position; this does the same arithmetic for whole groups of images, and logits for answers only.
    """

    def __init__(
        self,
        model: Qwen2_5_VLForConditionalGeneration,
        patch_head: torch.nn.Linear | None = None,
        token_head: torch.nn.Linear | None = None,
    ) -> None:
        self._model = model
        self._patch_head = patch_head
        self._token_head = token_head
        self._vision_positions: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def hidden_states(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the hidden states of the decoder, final and half-way `[num_rows, length, hidden]`, and of patches."""
        embeddings = self._model.get_input_embeddings()(batch.token_ids)
        encoded = [self._encode(grid, patches) for grid, patches in batch.patches]
        features = torch.cat([self._model.model.visual.merger(states) for states in encoded])
        patch_states = torch.cat([states.flatten(0, 1) for states in encoded])
        flat = embeddings.view(-1, embeddings.shape[-1])
        embeddings = flat.index_copy(0, batch.media_slots, features).view_as(embeddings)
        decoder = self._model.model.language_model
        cos, sin = decoder.rotary_emb(embeddings, batch.positions)
        bias = torch.zeros(batch.mask.shape, dtype=embeddings.dtype).masked_fill_(~batch.mask, -1e4)
        return *self._layers(embeddings, bias, cos, sin), patch_states

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the weighted mean cross-entropy of the answers' tokens, plus those of the labels."""
        hidden, middle, patch_states = self.hidden_states(batch)
        is_answer = batch.labels != IGNORED
        logits = self._model.lm_head(hidden[is_answer]).float()
        losses = F.cross_entropy(logits, batch.labels[is_answer], reduction="none")
        weights = batch.weights[is_answer]
        loss = (losses * weights).sum() / weights.sum()
        assert self._token_head is not None
        tokens = self._model.model.language_model.norm(middle.flatten(0, 1)[batch.media_slots])
        token_logits = self._token_head(tokens).float()
        for part, label in zip(token_logits.split(TOKEN_CLASSES, dim=-1), batch.token_labels.unbind(-1), strict=True):
            loss = loss + 0.1 * F.cross_entropy(part, label, ignore_index=IGNORED)
        return loss + 0.1 * self._label_loss(patch_states, batch.patch_labels)

    def patch_loss(self, patches: Sequence[tuple[tuple[int, int], torch.Tensor]], labels: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of the patches' labels alone, without the decoder."""
        states = torch.cat([self._encode(grid, group).flatten(0, 1) for grid, group in patches])
        return self._label_loss(states, labels)

    def _label_loss(self, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert self._patch_head is not None
        logits = self._patch_head(self._model.model.visual.merger.ln_q(states)).float()
        loss = torch.zeros(())
        for part, label in zip(logits.split(PATCH_CLASSES, dim=-1), labels.unbind(-1), strict=True):
            # Most patches show nothing: those that show something count ten times.
            weight = torch.full((part.shape[-1],), 10.0)
            weight[0] = 1.0
            loss = loss + F.cross_entropy(part, label, weight, ignore_index=IGNORED)
        return loss

    def _encode(self, grid: tuple[int, int], patches: torch.Tensor) -> torch.Tensor:
        """Encode `[num_images, num_patches, 1176]` of one grid into hidden states of its patches."""
        visual = self._model.model.visual
        weight = visual.patch_embed.proj.weight
        if grid not in self._vision_positions:
            grid_thw = torch.tensor([[1, grid[0] * MERGE_SIZE, grid[1] * MERGE_SIZE]])
            positions = get_vision_position_ids(grid_thw, MERGE_SIZE)
            cos, sin = visual.rotary_pos_emb(weight.float(), positions)
            self._vision_positions[grid] = cos.to(weight.dtype), sin.to(weight.dtype)
        hidden = F.linear(patches.to(weight.dtype), weight.flatten(1))
        return self._blocks(hidden, *self._vision_positions[grid])

    def _blocks(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        for block in self._model.model.visual.blocks:
            num_images, num_patches, width = hidden.shape
            attention = block.attn
            qkv = attention.qkv(block.norm1(hidden)).view(num_images, num_patches, 3, attention.num_heads, -1)
            query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = attend(rotate(query, cos, sin), rotate(key, cos, sin), value)
            hidden = hidden + attention.proj(mixed.transpose(1, 2).reshape(num_images, num_patches, width))
            hidden = hidden + block.mlp(block.norm2(hidden))
        return hidden

    def _layers(
        self, hidden: torch.Tensor, bias: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decoder = self._model.model.language_model
        cos, sin = cos[:, None], sin[:, None]
        middle = hidden
        for index, layer in enumerate(decoder.layers):
            if index == LABELLED_LAYERS:
                middle = hidden
            num_rows, length, width = hidden.shape
            attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            query, key, value = (
                project(normed).view(num_rows, length, -1, attention.head_dim).transpose(1, 2)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            num_groups = attention.num_key_value_groups
            mixed = attend(
                rotate(query, cos, sin),
                rotate(key, cos, sin).repeat_interleave(num_groups, dim=1),
                value.repeat_interleave(num_groups, dim=1),
                bias,
            )
            hidden = hidden + attention.o_proj(mixed.transpose(1, 2).reshape(num_rows, length, width))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return decoder.norm(hidden), middle


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to `[..., length, head_dim]`."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Attend in plain matrix products: on CPUs the backward pass of the fused kernel took three times as long."""
    scores = (query * query.shape[-1] ** -0.5) @ key.mT
    if bias is not None:
        scores = scores + bias
    return scores.softmax(dim=-1) @ value


@torch.no_grad()
def check_against_transformers(model: Qwen2_5_VLForConditionalGeneration, maker: RowMaker) -> None:
    """Assert that every branch of some rows gives the logits that transformers gives for it alone."""
    rows = maker.make(24, max_tokens=256)
    pad_token_id = model.config.text_config.pad_token_id
    hidden, *_ = TrainingForward(model).hidden_states(collate(rows, pad_token_id))
    for row, row_hidden in zip(rows, hidden, strict=True):
        branches = np.asarray(row.branches)
        for branch in range(max(branches[-1], 1) + 1):
            kept = np.flatnonzero((branches == 0) | (branches == branch))
            token_ids = torch.tensor(row.token_ids)[kept]
            types = (token_ids == maker.image_token_id).int() + 2 * (token_ids == maker.video_token_id).int()
            inputs: dict[str, Any] = {"input_ids": token_ids[None], "mm_token_type_ids": types[None]}
            for is_clip, name in ((False, "image"), (True, "video")):
                media = [item for _, item in row.media if item.is_clip is is_clip]
                if media:
                    frames = [item.pixels if is_clip else np.repeat(item.pixels, 2, axis=0) for item in media]
                    patches = [patchify(torch.from_numpy(item).unflatten(0, (-1, 2))).flatten(0, 1) for item in frames]
                    inputs["pixel_values_videos" if is_clip else "pixel_values"] = torch.cat(patches)
                    inputs[f"{name}_grid_thw"] = torch.tensor(
                        [[item.num_frames, item.grid[0] * MERGE_SIZE, item.grid[1] * MERGE_SIZE] for item in media]
                    )
            expected = model(**inputs).logits[0]
            logits = model.lm_head(row_hidden[torch.from_numpy(kept)])
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def check_image_processor(directory: Path) -> None:
    """Assert that training images are what the checkpoint's image processor makes of the same scenes."""
    processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
    rng = random.Random(0)
    for _ in range(20):
        image = scenes.draw(scenes.random_scene(rng))
        expected = processor(images=[image], return_tensors="pt")["pixel_values"]
        pixels = torch.from_numpy(np.repeat(prepare([image]).pixels, 2, axis=0))[None]
        torch.testing.assert_close(patchify(pixels)[0], expected, rtol=0, atol=1e-4)


# --- training --------------------------------------------------------------------------------------------------------


class Muon:
    """Momentum orthogonalized by Newton-Schulz iterations (Jordan et al., 2024), for the matrices of the blocks.

    Matrices of one shape are orthogonalized in one batched product.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        scales: Sequence[float],
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        self._scales, self._momentum, self._weight_decay = scales, momentum, weight_decay
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, parameter in enumerate(parameters):
            groups[tuple(parameter.shape)].append(index)
        self._parameters, self._groups = parameters, list(groups.values())
        self.buffers = [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], learning_rate: float) -> None:
        """Update every parameter in place."""
        for group in self._groups:
            for index in group:
                self.buffers[index].lerp_(gradients[index], 1 - self._momentum)
            update = torch.stack(
                [gradients[index].lerp(self.buffers[index], self._momentum) for index in group]
            ).bfloat16()
            is_tall = update.shape[1] > update.shape[2]
            if is_tall:
                update = update.mT.contiguous()
            update /= update.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
            for _ in range(5):
                gram = update @ update.mT
                update = torch.baddbmm(
                    update, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), update, beta=3.4445
                )
            if is_tall:
                update = update.mT
            scale = 0.2 * math.sqrt(max(update.shape[1:]))
            for index, step in zip(group, update.float(), strict=True):
                rate = learning_rate * self._scales[index]
                self._parameters[index].mul_(1 - rate * self._weight_decay).add_(step, alpha=-rate * scale)


def learning_rate_scale(step: int, num_steps: int) -> float:
    """Warm up over 100 steps, hold, and fall to zero over the last 45 % of the steps."""
    warmup = min(1.0, (step + 1) / 100)
    return warmup * min(1.0, (num_steps - step) / (0.45 * num_steps))


class Trainer:
    """Owns one worker's float32 weights, of which the model computes with bfloat16 copies, and its optimizers."""

    def __init__(self, named_parameters: Sequence[tuple[str, torch.nn.Parameter]], learning_rate: float) -> None:
        names, parameters = zip(*named_parameters, strict=True)
        self._learning_rate = learning_rate
        self._computed: tuple[torch.nn.Parameter, ...] = parameters
        self._weights = [parameter.detach().clone() for parameter in parameters]
        # One flat buffer, so that workers average their gradients in a single call.
        self._flat_gradient = torch.empty(sum(weight.numel() for weight in self._weights))
        views = torch.split(self._flat_gradient, [weight.numel() for weight in self._weights])
        self._gradients = [view.view_as(weight) for view, weight in zip(views, self._weights, strict=True)]
        is_matrix = [
            weight.ndim > 1 and not name.startswith(("patch_head", "token_head", "model.language_model.embed_tokens"))
            for name, weight in zip(names, self._weights, strict=True)
        ]
        self._matrices = [index for index, flag in enumerate(is_matrix) if flag]
        self._others = [index for index, flag in enumerate(is_matrix) if not flag]
        # Most of a patch is plain colour, along which all its pixels add up: its embedding takes smaller steps, without
        # which shades drown the edges, and shapes are not told apart.
        scales = [0.25 if "patch_embed" in names[index] else 1.0 for index in self._matrices]
        self._muon = Muon([self._weights[index].flatten(1) for index in self._matrices], scales)
        others = [self._weights[index] for index in self._others]
        self._adam = torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
        for parameter, weight in zip(self._computed, self._weights, strict=True):
            parameter.data = weight.to(torch.bfloat16)

    def update(self, scale: float) -> None:
        """Average the gradients of all workers, clip them, and take one step at `scale` times the learning rate."""
        for gradient, parameter in zip(self._gradients, self._computed, strict=True):
            assert parameter.grad is not None
            gradient.copy_(parameter.grad)
            parameter.grad = None
        if distributed.is_initialized():
            distributed.all_reduce(self._flat_gradient)
            self._flat_gradient /= distributed.get_world_size()
        self._flat_gradient *= min(1.0, 1.0 / (float(self._flat_gradient.norm()) + 1e-6))
        self._muon.step([self._gradients[index].flatten(1) for index in self._matrices], self._learning_rate * scale)
        for index in self._others:
            self._weights[index].grad = self._gradients[index]
        self._adam.param_groups[0]["lr"] = 0.5 * self._learning_rate * scale
        self._adam.step()
        self._copy_weights()

    def save(self, path: Path, step: int) -> None:
        """Write the checkpoint, replacing the one before it only when complete."""
        state = {"step": step, "weights": self._weights, "muon": self._muon.buffers, "adam": self._adam.state_dict()}
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> int:
        """Continue from a checkpoint; return its step."""
        state = torch.load(path, weights_only=True)
        for target, saved in zip(
            (*self._weights, *self._muon.buffers), (*state["weights"], *state["muon"]), strict=True
        ):
            target.copy_(saved)
        self._adam.load_state_dict(state["adam"])
        self._copy_weights()
        return int(state["step"])

    def finish(self) -> None:
        """Leave the model with the float32 weights."""
        for parameter, weight in zip(self._computed, self._weights, strict=True):
            parameter.data = weight.detach()

    def _copy_weights(self) -> None:
        for parameter, weight in zip(self._computed, self._weights, strict=True):
            parameter.data.copy_(weight)


def run_phase(
    name: str, trainer: Trainer, next_loss: Callable[[int], torch.Tensor], num_steps: int, options: argparse.Namespace
) -> None:
    """Take the steps of one phase that its checkpoint, if any, has not taken yet; `next_loss` is given the step."""
    checkpoint_path = options.work_dir / f"{name}.pt"
    is_first_worker = not distributed.is_initialized() or distributed.get_rank() == 0
    first_step = trainer.load(checkpoint_path) if checkpoint_path.exists() else 0
    progress = Progress(
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        disable=not is_first_worker,
    )
    bar = progress.add_task(name, total=num_steps, completed=first_step, loss=math.nan)
    mean_loss, last_save_s = math.nan, time.monotonic()
    with progress:
        for step in range(first_step, num_steps):
            loss = next_loss(step)
            loss.backward()  # type: ignore[no-untyped-call]
            trainer.update(learning_rate_scale(step, num_steps))
            mean_loss = loss.item() if math.isnan(mean_loss) else 0.98 * mean_loss + 0.02 * loss.item()
            progress.update(bar, completed=step + 1, loss=mean_loss)
            if is_first_worker and step % 20 == 0:
                with (options.work_dir / "log.txt").open("a") as log:
                    log.write(f"{time.strftime('%H:%M:%S')} {name} step {step} loss {mean_loss:.4f}\n")
            is_due = time.monotonic() - last_save_s > options.save_interval_s
            if is_first_worker and (is_due or step + 1 == num_steps):
                trainer.save(checkpoint_path, step + 1)
                last_save_s = time.monotonic()
    trainer.finish()


def train_worker(rank: int, options: argparse.Namespace) -> None:
    """Train in one of `options.num_workers` processes, which average their gradients at every step."""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    if options.num_workers > 1:
        meeting_point = f"file://{options.work_dir / 'rendezvous'}"
        distributed.init_process_group("gloo", meeting_point, rank=rank, world_size=options.num_workers)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.work_dir)
    config = make_config(tokenizer)
    model = Qwen2_5_VLForConditionalGeneration(config).train()
    if rank == 0:
        check_image_processor(options.work_dir)
        check_against_transformers(model, RowMaker(tokenizer, seed=0))
    patch_head = torch.nn.Linear(config.vision_config.hidden_size, sum(PATCH_CLASSES))
    token_head = torch.nn.Linear(config.text_config.hidden_size, sum(TOKEN_CLASSES))
    forward = TrainingForward(model, patch_head, token_head)
    # A resumed run draws other rows instead of going through the first ones again.
    seed = options.seed * 1_000_003 + rank + 101 * int(time.time()) * options.resume
    maker = RowMaker(tokenizer, seed)
    head = [(f"patch_head.{name}", parameter) for name, parameter in patch_head.named_parameters()]
    read = [(f"token_head.{name}", parameter) for name, parameter in token_head.named_parameters()]
    everything = [*model.named_parameters(), *head, *read]
    seeing = [item for item in everything if ".visual." in item[0] and ".merger.mlp" not in item[0]] + head

    def patch_loss(step: int) -> torch.Tensor:
        return forward.patch_loss(*maker.make_labelled_images(options.images_per_step // options.num_workers))

    def answer_loss(step: int) -> torch.Tensor:
        rows = maker.make(options.rows_per_step // options.num_workers, options.max_tokens)
        return forward.loss(collate(rows, config.text_config.pad_token_id))

    run_phase("vision", Trainer(seeing, options.learning_rate), patch_loss, options.num_vision_steps, options)
    run_phase("answers", Trainer(everything, options.learning_rate), answer_loss, options.num_steps, options)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def export(work_dir: Path, output: Path) -> None:
    """Write the checkpoint's weights as a directory that transformers loads."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work_dir)
    model = Qwen2_5_VLForConditionalGeneration(make_config(tokenizer))
    checkpoint = torch.load(work_dir / "answers.pt", weights_only=True)
    with torch.no_grad():
        for parameter, saved in zip(model.parameters(), checkpoint["weights"], strict=False):  # the last are the head's
            parameter.copy_(saved)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config.pad_token_id = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    model.generation_config.do_sample = False
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"):
        shutil.copyfile(work_dir / name, output / name)
    print(f"wrote {sum(p.numel() for p in model.parameters()):,} parameters to {output}")


def main() -> None:
    """Parse the command line, train, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="directory to write the model to")
    parser.add_argument("--work-dir", type=Path, default=Path("demo-model-training"), help="tokenizer, checkpoint, log")
    parser.add_argument("--num-steps", type=int, default=2400)
    parser.add_argument("--num-vision-steps", type=int, default=900)
    parser.add_argument("--images-per-step", type=int, default=48)
    parser.add_argument("--rows-per-step", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=224, help="longest row")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--num-workers", type=int, default=os.cpu_count() or 1, help="processes of one thread each")
    parser.add_argument("--save-interval-s", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the work directory")
    parser.add_argument("--export-only", action="store_true", help="write the model as the checkpoint has it")
    options = parser.parse_args()
    options.work_dir = options.work_dir.resolve()
    options.work_dir.mkdir(parents=True, exist_ok=True)
    if not options.export_only:
        (options.work_dir / "rendezvous").unlink(missing_ok=True)
        if not options.resume:
            for name in ("vision.pt", "answers.pt"):
                (options.work_dir / name).unlink(missing_ok=True)
            train_tokenizer(options.work_dir, options.seed)
        if options.num_workers > 1:
            multiprocessing.spawn(train_worker, args=(options,), nprocs=options.num_workers)
        else:
            train_worker(0, options)
    export(options.work_dir, options.output)


if __name__ == "__main__":
    main()
