"""Any decoded image to 8-bit sRGB: bit depths, transparency, colour spaces, orientation. Knows nothing of files.

Transparency is composited on white, which is what a page shows behind an image.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image, ImageCms

_ALPHA_MODES = frozenset({"RGBA", "RGBa", "LA", "La", "PA"})
_WHITE = (255, 255, 255)
_MAX_PROFILE_BYTES = 4 * 2**20
_MIN_IS_WHITE_TAG = 262
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PNG_GRAY_SCALE = {"1": 255, "L;1": 255, "L;2": 85, "L;4": 17}
"""What Pillow multiplies grey levels of few bits by, but not the level that is declared transparent."""


def orient(image: Image.Image, orientation: int) -> Image.Image:
    """Turn and mirror an image upright, given its EXIF orientation (1 to 8)."""
    transpose = _TRANSPOSE.get(orientation)
    return image if transpose is None else image.transpose(transpose)


def scaled_transparency(image: Image.Image) -> Any:
    """Return the transparent colour of an opened, not yet loaded PNG in the units of its loaded pixels."""
    transparency = image.info.get("transparency")
    tiles = getattr(image, "tile", None)
    rawmode = tiles[0][3] if tiles else None
    if isinstance(transparency, int) and isinstance(rawmode, str):
        return transparency * _PNG_GRAY_SCALE.get(rawmode, 1)
    if isinstance(transparency, tuple) and rawmode == "RGB;16B":
        return tuple(level >> 8 for level in transparency)
    return transparency


def to_rgb(image: Image.Image) -> Image.Image:
    """Return a loaded image as 8-bit sRGB."""
    profile = image.info.get("icc_profile")
    alpha: Image.Image | None = None
    if image.mode.startswith("I") or image.mode == "F":
        image, alpha = _reduce_depth(image)
    elif image.mode in _ALPHA_MODES or image.info.get("transparency") is not None:
        image = image.convert("L").convert("RGBA") if image.mode == "1" else image.convert("RGBA")
        alpha = image.getchannel("A")
        image = image.convert("RGB")
    elif image.mode not in ("RGB", "L", "CMYK"):
        image = image.convert("RGB")
    rgb = _to_srgb(image, profile)
    if alpha is None or alpha.getextrema() == (255, 255):
        return rgb
    canvas = Image.new("RGB", rgb.size, _WHITE)
    canvas.paste(rgb, mask=alpha)
    return canvas


def _reduce_depth(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Scale one channel of 16-bit, 32-bit or float samples to 8 bits.

    16-bit samples are scaled by their type's range, floats in [0, 1] by that; anything else has no agreed range and is
    stretched between its own extremes.
    """
    samples = np.asarray(image)
    transparency = image.info.get("transparency")
    alpha = None
    if isinstance(transparency, int):
        alpha = Image.fromarray(np.where(samples == transparency, 0, 255).astype(np.uint8))
    if samples.dtype.kind == "f":
        samples = np.nan_to_num(samples, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(samples.min()), float(samples.max())
    is_16_bit = image.mode.startswith("I;16") or (image.mode == "I" and low >= 0 and 255 < high <= 65535)
    if is_16_bit:
        low, high = 0.0, 65535.0
    elif low >= 0 and high <= 255:
        low, high = 0.0, 1.0 if samples.dtype.kind == "f" and high <= 1 else 255.0
    scale = 255.0 / (high - low) if high > low else 0.0
    levels = np.rint((samples.astype(np.float32) - np.float32(low)) * np.float32(scale)).clip(0, 255).astype(np.uint8)
    tags = getattr(image, "tag_v2", None)
    if image.mode.startswith("I;16") and tags is not None and tags.get(_MIN_IS_WHITE_TAG) == 0:
        levels = 255 - levels
    return Image.fromarray(levels), alpha


def _to_srgb(image: Image.Image, profile: object) -> Image.Image:
    """Apply an embedded colour profile; one that is damaged or does not fit the image is as good as none."""
    if isinstance(profile, bytes) and 128 <= len(profile) <= _MAX_PROFILE_BYTES:
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            if "srgb" not in (source.profile.profile_description or "").lower():
                target = ImageCms.createProfile("sRGB")
                converted = ImageCms.profileToProfile(image, source, target, outputMode="RGB")
                if converted is not None:
                    return converted
        except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
            pass
    return image.convert("RGB")
