"""What a Qwen2.5-VL prompt looks like: the layout of media, placeholders, rotary positions, and the model's identity.

Works from the checkpoint's JSON files alone, without torch: an ingress needs all of this and none of the weights, which
``load_encoder`` and ``load_language_model`` read. Knows nothing of pixels, schedulers or caches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from encoders.checkpoint import hash_checkpoint, read_json
from encoders.qwen2_5_vl.processor import MAX_ASPECT_RATIO, PixelBudget, ProcessorSettings, smart_resize
from epd.config import ModelConfig
from epd.errors import ConfigError, InvalidRequestError
from epd.types import (
    Encoder,
    LanguageModel,
    MediaItem,
    MediaLayout,
    Modality,
    PlaceholderRange,
    Request,
    RotaryPositions,
)

if TYPE_CHECKING:
    from epd.engine.native import Kernels

    Positions = np.ndarray[Any, np.dtype[np.int64]]

LOW_DETAIL_TOKENS = 256
"""What an image with ``detail: low`` may take of the prompt, unless the checkpoint's own minimum is more."""


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """The part of ``config.json`` that decides what a prompt looks like."""

    image_token_id: int
    video_token_id: int
    merge_size: int
    tokens_per_second: float
    hidden_size: int
    max_position_embeddings: int

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Self:
        """Take the fields from a ``config.json`` in either form: text settings at the top, or in ``text_config``.

        Fields that are absent have the defaults of ``transformers``' Qwen2_5_VLConfig.
        Raises ``ConfigError`` for what cannot be served.
        """
        text = config.get("text_config") or config
        vision = config.get("vision_config") or {}
        if "quantization_config" in config:
            raise ConfigError("args.model.source", "quantized checkpoints are not supported")
        if text.get("use_sliding_window"):
            raise ConfigError("args.model.source", "sliding window attention is not supported")
        hidden_size = text.get("hidden_size", 8192)
        width = vision.get("out_hidden_size", 3584)
        if hidden_size != width:
            message = f"config.json: the vision tower gives {width} columns, the language model takes {hidden_size}"
            raise ConfigError("args.model.source", message)
        return cls(
            image_token_id=config.get("image_token_id", 151655),
            video_token_id=config.get("video_token_id", 151656),
            merge_size=vision.get("spatial_merge_size", 2),
            tokens_per_second=vision.get("tokens_per_second", 4),
            hidden_size=hidden_size,
            max_position_embeddings=text.get("max_position_embeddings", 32768),
        )


class Qwen2_5_VLFamily:
    """The family over one checkpoint; implements ``ModelFamily``."""

    name = "qwen2_5_vl"

    def __init__(self, model: ModelConfig, directory: Path) -> None:
        self._directory = directory
        self._config = PromptConfig.parse(read_json(directory / "config.json"))
        self._processor = ProcessorSettings.read(directory)
        self.embedding_width = self._config.hidden_size
        self.max_model_len = self._config.max_position_embeddings
        if model.max_model_len is not None:
            if model.max_model_len > self.max_model_len:
                message = f"the model's context is {self.max_model_len} tokens, {model.max_model_len} were asked for"
                raise ConfigError("args.model.max_model_len", message)
            self.max_model_len = model.max_model_len
        described = f"{hash_checkpoint(directory)}|{model.revision}|{model.dtype}|{self._processor}"
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()[:32]

    def image_layout(self, width: int, height: int, *, detail: str = "auto") -> MediaLayout:
        """Return the layout of an image of EXIF-oriented size.

        ``detail`` is ``low`` for at most ``LOW_DETAIL_TOKENS`` tokens, ``high`` or ``auto`` for the budget of the
        checkpoint's own processor. Raises ``InvalidRequestError`` if the image cannot be used.
        """
        budget = self._processor.image
        if detail == "low":
            low_pixels = LOW_DETAIL_TOKENS * self._processor.patches.factor**2
            budget = PixelBudget(budget.min_pixels, max(budget.min_pixels, min(budget.max_pixels, low_pixels)))
        elif detail not in ("auto", "high"):
            raise InvalidRequestError(f"detail must be auto, low or high, not {detail!r}")
        return self._layout(width, height, 1, budget, "image")

    def video_layout(self, width: int, height: int, timestamps_s: Sequence[float]) -> MediaLayout:
        """Return the layout of a clip whose frames are sampled at ``timestamps_s``."""
        if not timestamps_s:
            raise InvalidRequestError("The video has no frames.")
        num_groups = -(-len(timestamps_s) // self._processor.patches.temporal_patch_size)
        return self._layout(width, height, num_groups, self._processor.video_budget(len(timestamps_s)), "video")

    def _layout(self, width: int, height: int, num_groups: int, budget: PixelBudget, kind: str) -> MediaLayout:
        if width < 1 or height < 1:
            raise InvalidRequestError(f"The {kind} is empty: {width}x{height} pixels.")
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise InvalidRequestError(
                f"The {kind} is too long and thin: {width}x{height} pixels; "
                f"one side may be at most {MAX_ASPECT_RATIO} times the other."
            )
        patches = self._processor.patches
        new_width, new_height = smart_resize(width, height, patches.factor, budget)
        grid_thw = (num_groups, new_height // patches.patch_size, new_width // patches.patch_size)
        num_tokens = num_groups * (new_height // patches.factor) * (new_width // patches.factor)
        return MediaLayout(grid_thw, num_tokens)

    def video_timestamps(self, duration_s: float, fps: float, num_frames: int) -> tuple[float, ...]:
        """Choose which frames of a clip the model sees: evenly spaced from the start, as ``transformers`` samples.

        The times are exact multiples of the duration over the number of samples; the frame taken at a time is the
        last one that starts no later. Rotary positions follow from these times. A clip of one frame has one
        timestamp, any other an even number of them.
        """
        if num_frames < 1:
            raise InvalidRequestError("The video has no frames.")
        if duration_s <= 0.0:
            duration_s = num_frames / fps if fps > 0.0 else 0.0
        sampling = self._processor.sampling
        group = self._processor.patches.temporal_patch_size
        most = min(sampling.max_frames, num_frames) // group * group
        if most == 0:
            return (0.0,)
        wanted = min(max(duration_s * sampling.fps, sampling.min_frames), most)
        # Two seconds are often stored as a little less, which must not cost a group of frames.
        num_samples = max(int(wanted + 1e-6) // group, 1) * group
        return tuple(index * duration_s / num_samples for index in range(num_samples))

    def expand_placeholders(
        self, token_ids: Sequence[int], modalities: Sequence[Modality], layouts: Sequence[MediaLayout]
    ) -> tuple[tuple[int, ...], tuple[PlaceholderRange, ...]]:
        """Replace the single placeholder of each item, in order, by as many as its layout has tokens.

        Raises ``InvalidRequestError`` if placeholders and items do not match one to one.
        """
        modality_of = {self._config.image_token_id: Modality.IMAGE, self._config.video_token_id: Modality.VIDEO}
        placeholders = [modality_of[token_id] for token_id in token_ids if token_id in modality_of]
        if placeholders != list(modalities):
            raise InvalidRequestError(
                f"The prompt has places for {_count(placeholders)}, but the request has {_count(modalities)}, or in "
                "another order. Text must not contain the model's own image and video tokens."
            )
        expanded: list[int] = []
        ranges: list[PlaceholderRange] = []
        remaining = iter(layouts)
        for token_id in token_ids:
            num_tokens = 1
            if token_id in modality_of:
                num_tokens = next(remaining).num_tokens
                ranges.append(PlaceholderRange(len(expanded), num_tokens))
            expanded.extend([token_id] * num_tokens)
        return tuple(expanded), tuple(ranges)

    def rotary_positions(self, request: Request) -> RotaryPositions:
        """Return positions for ``request.prompt_token_ids``: time, row and column (M-RoPE).

        Text counts on by one in all three. The tokens of an item share the item's start, and add their row and column
        in the grid; frames of a clip add the seconds since its start, in units of ``tokens_per_second``.
        """
        parts: list[Positions] = []
        end, next_position = 0, 0
        for item in sorted(request.items, key=lambda item: item.placeholder.offset):
            num_text = item.placeholder.offset - end
            parts.append(_text_positions(next_position, num_text))
            next_position += num_text
            parts.append(self._item_positions(item) + next_position)
            next_position += max(item.grid_thw[1:]) // self._config.merge_size
            end = item.placeholder.end
        parts.append(_text_positions(next_position, request.num_prompt_tokens - end))
        positions = np.concatenate(parts, axis=1)
        delta = int(positions.max(initial=-1)) + 1 - positions.shape[1]
        return RotaryPositions(positions, delta)

    def _item_positions(self, item: MediaItem) -> Positions:
        """Return the positions of an item's tokens from its start on, ``[3, num_tokens]``."""
        merge = self._config.merge_size
        num_groups, rows, columns = item.grid_thw[0], item.grid_thw[1] // merge, item.grid_thw[2] // merge
        # In float32, and cut off: what the reference does, so that positions are the same at every rate.
        interval = np.float32(self._config.tokens_per_second) * np.float32(self._seconds_per_group(item))
        times = (np.arange(num_groups, dtype=np.float32) * interval).astype(np.int64)
        grid = np.meshgrid(times, np.arange(rows), np.arange(columns), indexing="ij")
        return np.stack(grid).reshape(3, -1).astype(np.int64)

    def _seconds_per_group(self, item: MediaItem) -> float:
        """Return the time between the temporal patches of a clip, from the times of its frames.

        Frames stand at even times or, rounded to frames of the file, somewhat before them. The largest average gap
        since the first frame is therefore the nearest to the even one: exact if any frame stands at its even time.
        """
        first_s, *later_s = item.timestamps_s or (0.0,)
        gap_s = max(((time_s - first_s) / count for count, time_s in enumerate(later_s, start=1)), default=0.0)
        return self._processor.patches.temporal_patch_size * gap_s

    def load_encoder(self, *, dtype: str, device: str = "cpu", kernels: Kernels | None = None) -> Encoder:
        """Read the vision tower only."""
        from encoders.qwen2_5_vl.encoder import Qwen2_5_VLEncoder

        patches = self._processor.patches
        return Qwen2_5_VLEncoder(self, self._directory, patches, dtype=dtype, device=device, kernels=kernels)

    def load_language_model(self, *, dtype: str, device: str = "cpu") -> LanguageModel:
        """Read the language model only."""
        from encoders.qwen2_5_vl.language_model import Qwen2_5_VLLanguageModel

        return Qwen2_5_VLLanguageModel(self._directory, dtype=dtype, device=device)


def _text_positions(start: int, num_tokens: int) -> Positions:
    return np.broadcast_to(np.arange(start, start + num_tokens, dtype=np.int64), (3, num_tokens))


def _count(modalities: Sequence[Modality]) -> str:
    counts = [(sum(m is modality for m in modalities), modality.value) for modality in Modality]
    return " and ".join(f"{count} {kind}{'' if count == 1 else 's'}" for count, kind in counts)
