"""One decoded frame of a clip to an upright RGB image. Knows nothing of containers or time."""

from __future__ import annotations

import struct
from typing import Any

from av.sidedata.sidedata import Type as SideDataType
from PIL import Image

from epd.media.color import orient, to_rgb

# EXIF orientation by the signs of a display matrix's (a, b, c, d), where x' = a x + c y and y' = b x + d y.
_ORIENTATIONS = {
    (1, 0, 0, 1): 1,
    (-1, 0, 0, 1): 2,
    (-1, 0, 0, -1): 3,
    (1, 0, 0, -1): 4,
    (0, 1, 1, 0): 5,
    (0, 1, -1, 0): 6,
    (0, -1, -1, 0): 7,
    (0, -1, 1, 0): 8,
}


def frame_orientation(frame: Any) -> int:
    """Return how a frame is to be turned, as an EXIF orientation. Angles other than quarter turns are not applied."""
    side_data = frame.side_data.get(SideDataType.DISPLAYMATRIX)
    if side_data is None:
        return 1
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(side_data)[:36])
    largest = max(abs(a), abs(b), abs(c), abs(d), 1)
    return _ORIENTATIONS.get(tuple(round(value / largest) for value in (a, b, c, d)), 1)


def frame_size(frame: Any) -> tuple[int, int]:
    """Return width and height of a frame as it will be seen."""
    return (frame.height, frame.width) if frame_orientation(frame) >= 5 else (frame.width, frame.height)


def frame_to_rgb(frame: Any) -> Image.Image:
    """Convert a frame to 8-bit RGB, upright, transparency composited on white."""
    has_alpha = any(component.is_alpha for component in frame.format.components) or frame.format.has_palette
    if has_alpha:
        image = to_rgb(Image.fromarray(frame.to_ndarray(format="rgba")))
    else:
        image = Image.fromarray(frame.to_ndarray(format="rgb24"))
    return orient(image, frame_orientation(frame))
