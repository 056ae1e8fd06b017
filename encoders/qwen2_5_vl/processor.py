"""What Qwen2-VL's image and video processors do: sizes known from a header, and patches made from pixels.

Reads the processor's settings from a checkpoint and gives the same grids and, for images, bit for bit the same patches
as ``transformers``. Knows nothing of models, prompts or requests, and needs torch nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from encoders.checkpoint import read_json
from epd.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    Patches = np.ndarray[Any, np.dtype[np.float32]]

MAX_ASPECT_RATIO = 200
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3


@dataclass(frozen=True, slots=True)
class PixelBudget:
    """How many pixels an image or frame may have after resizing."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, slots=True)
class PatchSettings:
    """How resized pixels become patches; the same for images and frames."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    resample: int
    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def factor(self) -> int:
        """Sides of a resized image are multiples of this many pixels: those of one token."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """Which frames of a clip are taken, and what they may weigh together.

    ``max_video_tokens`` bounds a clip as the reference implementation (qwen-vl-utils) does: every frame gets an even
    share of 90 % of it, on top of its own budget. ``None`` leaves clips unbounded.
    """

    fps: float
    min_frames: int
    max_frames: int
    max_video_tokens: int | None


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """The settings of a checkpoint's image and video processors."""

    patches: PatchSettings
    image: PixelBudget
    video: PixelBudget
    sampling: FrameSampling

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the settings, looking where ``transformers`` looks, in its order.

        A checkpoint without settings for video uses those for images, as ``transformers`` does. Settings that are
        nowhere get the defaults of Qwen2-VL's processors; frames are sampled at 2 a second.

        Raises ``ConfigError`` if there are none at all, or they ask for steps that are not supported.
        """
        nested = read_json(directory / "processor_config.json", required=False)
        plain = read_json(directory / "preprocessor_config.json", required=False)
        image = nested.get("image_processor") or plain
        if not image:
            raise ConfigError("args.model.source", f"{directory} has no image processor settings")
        video = (
            nested.get("video_processor")
            or read_json(directory / "video_preprocessor_config.json", required=False)
            or plain
        )
        for step in ("do_resize", "do_rescale", "do_normalize"):
            if not image.get(step, True):
                raise ConfigError("args.model.source", f"the image processor's {step} is off, which is not supported")
        patches = PatchSettings(
            patch_size=image.get("patch_size", 14),
            temporal_patch_size=image.get("temporal_patch_size", 2),
            merge_size=image.get("merge_size", 2),
            resample=image.get("resample", _BICUBIC),
            rescale_factor=image.get("rescale_factor", 1 / 255),
            mean=tuple(image.get("image_mean", _CLIP_MEAN)),
            std=tuple(image.get("image_std", _CLIP_STD)),
        )
        is_capped = video.get("cap_pixels_per_frame") is not False
        sampling = FrameSampling(
            fps=video.get("fps") or 2.0,
            min_frames=video.get("min_frames", 4),
            max_frames=video.get("max_frames", 768),
            max_video_tokens=video.get("max_video_tokens", 128_000) if is_capped else None,
        )
        return cls(
            patches,
            _read_budget(image, PixelBudget(56 * 56, 28 * 28 * 1280)),
            _read_budget(video, PixelBudget(128 * 28 * 28, 768 * 28 * 28)),
            sampling,
        )

    def video_budget(self, num_frames: int) -> PixelBudget:
        """Return the budget of each of ``num_frames`` frames of a clip."""
        budget = self.video
        if self.sampling.max_video_tokens is None:
            return budget
        all_pixels = int(self.sampling.max_video_tokens * self.patches.factor**2 * 0.9)
        share = all_pixels * self.patches.temporal_patch_size // num_frames
        return PixelBudget(budget.min_pixels, max(min(budget.max_pixels, share), int(budget.min_pixels * 1.05)))


def _read_budget(settings: Mapping[str, Any], default: PixelBudget) -> PixelBudget:
    size = settings.get("size") or {"shortest_edge": default.min_pixels, "longest_edge": default.max_pixels}
    min_pixels, max_pixels = settings.get("min_pixels"), settings.get("max_pixels")
    return PixelBudget(
        size["shortest_edge"] if min_pixels is None else min_pixels,
        size["longest_edge"] if max_pixels is None else max_pixels,
    )


def smart_resize(width: int, height: int, factor: int, budget: PixelBudget) -> tuple[int, int]:
    """Return the width and height that Qwen2-VL resizes to: multiples of ``factor`` within the budget, of about the
    same aspect ratio, which must be at most ``MAX_ASPECT_RATIO``."""
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > budget.max_pixels:
        scale = math.sqrt(height * width / budget.max_pixels)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
    elif new_height * new_width < budget.min_pixels:
        scale = math.sqrt(budget.min_pixels / (height * width))
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return new_width, new_height


class Patchifier:
    """Turns frames into patches. Thread-safe, and outside the GIL for most of its time."""

    def __init__(self, settings: PatchSettings) -> None:
        import numpy as np

        self._settings = settings
        # Rescaling and normalization act on each of 256 values alone, so they are done once, in the steps and
        # precisions of transformers' image_transforms: [num_channels, 256].
        values = np.arange(256, dtype=np.uint8)
        rescaled = (values.astype(np.float64) * settings.rescale_factor).astype(np.float32)
        mean, std = (np.array(side, dtype=np.float32)[:, None] for side in (settings.mean, settings.std))
        self._normalized = (rescaled[None] - mean) / std

    def patchify(self, frames: Sequence[Image.Image], grid_thw: tuple[int, int, int]) -> Patches:
        """Resize RGB frames to the grid and cut them into float32 patches ``[num_patches, patch_dim]``.

        A temporal patch takes ``temporal_patch_size`` frames; the last frame is repeated to fill the last one, which
        makes a still image a clip of one frame. Patches come in the order of the tower: by merged token.
        """
        import numpy as np

        settings = self._settings
        num_groups, rows, columns = grid_thw
        size, merge, depth = settings.patch_size, settings.merge_size, settings.temporal_patch_size
        cut_shape = (3, rows // merge, merge, size, columns // merge, merge, size)
        tiles_shape = (num_groups, rows // merge, columns // merge, merge, merge, 3, depth, size, size)
        tiles: Patches = np.empty(tiles_shape, dtype=np.float32)
        for slot in range(num_groups * depth):
            if slot < len(frames):
                planes = self._normalize(frames[slot].resize((columns * size, rows * size), settings.resample))
            group, moment = divmod(slot, depth)
            tiles[group, :, :, :, :, :, moment] = planes.reshape(cut_shape).transpose(1, 4, 2, 5, 0, 3, 6)
        return tiles.reshape(num_groups * rows * columns, -1)

    def _normalize(self, image: Image.Image) -> Patches:
        """Return float32 ``[3, height, width]`` for an RGB image."""
        import numpy as np

        pixels = np.asarray(image)
        planes: Patches = np.empty((3, *pixels.shape[:2]), dtype=np.float32)
        for channel in range(3):
            np.take(self._normalized[channel], pixels[:, :, channel], out=planes[channel], mode="clip")
        return planes
