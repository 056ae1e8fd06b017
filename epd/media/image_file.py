"""Opening encoded images: which formats, how large, which way up. Reads headers only; decodes nothing.

Animated and multi-page files sent as an image stand for their first frame or page.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import ExifTags, Image, UnidentifiedImageError

from epd.config import MediaConfig
from epd.errors import MediaError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "AVIF")
"""What is opened at all. Pillow knows thirty more, some of which start other programs or are read by nobody's eyes."""
_FORMAT_NAMES = "JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF"

_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_AVIF_BRANDS = (b"avif", b"avis")
_EBML = b"\x1a\x45\xdf\xa3"

_TILE_WIDTH_TAG, _TILE_LENGTH_TAG = 322, 323

_SWAPPED_ORIENTATIONS = frozenset({5, 6, 7, 8})
_DECODER_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    AttributeError,
    EOFError,
    struct.error,
    zlib.error,
    Warning,
)
"""What Pillow's parsers raise on damaged files: their own errors, and accidents such as a missing tag's ``KeyError``.

``Warning`` is for processes that turn warnings into errors."""

# Pillow warns and raises past a size that is one for the whole process. Here the limit is the configuration's, checked
# as soon as the header is read and before anything is decoded.
Image.MAX_IMAGE_PIXELS = None


@contextmanager
def opened_image(data: bytes, config: MediaConfig, param: str | None) -> Iterator[Image.Image]:
    """Open an image within the limits. What Pillow raises inside, too, comes out as ``MediaError``."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            check_image_size(image.width, image.height, config, param)
            _check_tile_size(image, config, param)
            yield image
    except UnidentifiedImageError as error:
        raise MediaError(_describe_unknown(data), param) from error
    except MemoryError as error:
        raise MediaError("the image needs more memory than there is", param) from error
    except _DECODER_ERRORS as error:
        raise MediaError("the image is damaged or truncated", param) from error


def check_image_size(width: int, height: int, config: MediaConfig, param: str | None) -> None:
    """Raise ``MediaError`` for a size that is nothing or too much."""
    if width < 1 or height < 1:
        raise MediaError("the image has no pixels", param)
    if width * height > config.max_pixels:
        raise MediaError(
            f"the image has {width} x {height} pixels; at most {config.max_pixels} pixels are allowed", param
        )


def _check_tile_size(image: Image.Image, config: MediaConfig, param: str | None) -> None:
    """Hold the tiles of a TIFF to the same limit: they are read whole, and may be larger than the image."""
    tags = getattr(image, "tag_v2", None)
    if tags is not None:
        check_image_size(tags.get(_TILE_WIDTH_TAG, 1), tags.get(_TILE_LENGTH_TAG, 1), config, param)


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8, that is still to be applied to an opened, not yet loaded image.

    Pillow applies a TIFF's own. Metadata that cannot be read does not make an image unusable.
    """
    if image.format == "TIFF":
        return 1
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # asking Pillow would decode the whole image in search of a late chunk
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except _DECODER_ERRORS:
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def oriented_size(image: Image.Image) -> tuple[int, int]:
    """Return width and height as the image will be seen."""
    width, height = image.size
    return (height, width) if orientation_of(image) in _SWAPPED_ORIENTATIONS else (width, height)


def _describe_unknown(data: bytes) -> str:
    brand = data[8:12] if data[4:8] == b"ftyp" else b""
    if brand in _HEIC_BRANDS:
        return f"HEIC images are not supported; send {_FORMAT_NAMES}"
    if (brand and brand not in _AVIF_BRANDS) or data.startswith(_EBML):
        return "this is a video; send it as video_url"
    start = data[:256].lstrip().lower()
    if start.startswith((b"<svg", b"<?xml")):
        return f"vector images are not supported; send {_FORMAT_NAMES}"
    if start.startswith((b"<!doctype", b"<html", b"{")):
        return "this is a web page or a document, not an image"
    return f"this is not an image in a supported format ({_FORMAT_NAMES}), or its header is damaged"
