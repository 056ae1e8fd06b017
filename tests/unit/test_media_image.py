"""If this fails, pictures reach the model turned, black, washed out, or not at all; or a bomb reaches the decoder."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from epd.config import MediaConfig
from epd.errors import MediaError
from epd.media.decode import decode_image
from epd.media.probe import MediaInfo, probe
from epd.types import Modality

CONFIG = MediaConfig()
RED, WHITE = (255, 0, 0), (255, 255, 255)


def encoded(image: Image.Image, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def probed(data: bytes, config: MediaConfig = CONFIG) -> MediaInfo:
    return probe(data, modality=Modality.IMAGE, param="messages[0].content[1]", config=config)


def quadrants(width: int = 64, height: int = 32) -> Image.Image:
    """Red, green / blue, yellow: every orientation looks different."""
    image = Image.new("RGB", (width, height), RED)
    image.paste((0, 255, 0), (width // 2, 0, width, height // 2))
    image.paste((0, 0, 255), (0, height // 2, width // 2, height))
    image.paste((255, 255, 0), (width // 2, height // 2, width, height))
    return image


def assert_close(image: Image.Image, expected: Image.Image, tolerance: float = 4.0) -> None:
    assert image.mode == "RGB"
    assert image.size == expected.size
    difference = np.abs(np.asarray(image, dtype=int) - np.asarray(expected.convert("RGB"), dtype=int))
    assert difference.mean() <= tolerance


def png(width: int, height: int, bit_depth: int, color_type: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """Write a PNG by hand: some kinds exist that Pillow reads but does not write."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, bit_depth, color_type, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, body) for kind, body in parts)


@pytest.mark.parametrize(
    ("image_format", "options"),
    [
        ("JPEG", {"quality": 95, "subsampling": 0}),
        ("JPEG", {"quality": 95, "subsampling": 0, "progressive": True}),
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"quality": 95}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "jpeg"}),
        ("AVIF", {"quality": 95}),
    ],
)
def test_every_common_format_is_read(image_format: str, options: dict[str, Any]) -> None:
    data = encoded(quadrants(), image_format, **options)
    assert probed(data) == MediaInfo(Modality.IMAGE, 64, 32)
    assert_close(decode_image(data, CONFIG), quadrants())


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_to_size_and_pixels(image_format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # what the camera did, as a transpose
    stored = quadrants() if orientation == 1 else quadrants().transpose(Image.Transpose(undo[orientation]))
    data = encoded(stored, image_format, exif=exif)
    info = probed(data)
    assert (info.width, info.height) == (64, 32)
    assert_close(decode_image(data, CONFIG), quadrants(), tolerance=12)


@pytest.mark.parametrize("orientation", [0, 9, 255, 65535])
def test_a_nonsensical_orientation_is_ignored(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert_close(decode_image(encoded(quadrants(), "PNG", exif=exif), CONFIG), quadrants())


def test_orientation_after_the_pixels_of_a_png_does_not_make_size_and_pixels_disagree() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = encoded(quadrants(), "PNG")
    body = exif.tobytes()[6:]
    chunk = struct.pack(">I", len(body)) + b"eXIf" + body + struct.pack(">I", zlib.crc32(b"eXIf" + body))
    data = plain[:-12] + chunk + plain[-12:]
    info = probed(data)
    assert decode_image(data, CONFIG).size == (info.width, info.height)


@pytest.mark.parametrize(
    ("mode", "image_format", "options"),
    [
        ("RGBA", "PNG", {}),
        ("RGBA", "WEBP", {"lossless": True}),
        ("RGBA", "TIFF", {}),
        ("RGBA", "GIF", {}),
        ("RGBA", "AVIF", {"quality": 100}),
        ("LA", "PNG", {}),
        ("LA", "TIFF", {}),
        ("PA", "TIFF", {}),
    ],
)
def test_transparency_is_composited_on_white(mode: str, image_format: str, options: dict[str, Any]) -> None:
    image = Image.new("RGBA", (8, 4), (0, 0, 0, 255))
    image.paste((0, 0, 0, 0), (4, 0, 8, 4))
    data = encoded(image.convert(mode), image_format, **options)
    decoded = decode_image(data, CONFIG)
    assert decoded.getpixel((1, 1)) == (0, 0, 0)
    assert decoded.getpixel((6, 1)) == WHITE


def test_half_transparency_is_mixed_with_white() -> None:
    decoded = decode_image(encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 128)), "PNG"), CONFIG)
    assert decoded.getpixel((0, 0)) == pytest.approx((255, 127, 127), abs=1)


def test_a_transparent_palette_entry_is_white() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.putpixel((0, 0), 0)
    decoded = decode_image(encoded(image, "PNG", transparency=0), CONFIG)
    assert decoded.getpixel((0, 0)) == WHITE
    assert decoded.getpixel((1, 1)) == RED


@pytest.mark.parametrize(
    ("bit_depth", "rows", "transparent", "expected"),
    [
        (1, b"\x00\x40", 0, [WHITE, WHITE]),  # black is transparent, white is white
        (1, b"\x00\x40", 1, [(0, 0, 0), WHITE]),
        (2, b"\x00\x10", 1, [(0, 0, 0), WHITE]),
        (4, b"\x00\x0a", 10, [(0, 0, 0), WHITE]),
        (8, b"\x00\x00\x64", 100, [(0, 0, 0), WHITE]),
        (16, b"\x00\x00\x00\x12\x34", 0x1234, [(0, 0, 0), WHITE]),
    ],
)
def test_a_transparent_grey_level_is_white_at_every_bit_depth(
    bit_depth: int, rows: bytes, transparent: int, expected: list[tuple[int, int, int]]
) -> None:
    decoded = decode_image(png(2, 1, bit_depth, 0, rows, (b"tRNS", struct.pack(">H", transparent))), CONFIG)
    assert [decoded.getpixel((x, 0)) for x in range(2)] == expected


def test_a_transparent_colour_of_16_bits_is_white() -> None:
    rows = b"\x00" + struct.pack(">6H", 0, 0, 0, 0x8000, 0x4000, 0x2000)
    data = png(2, 1, 16, 2, rows, (b"tRNS", struct.pack(">3H", 0x8000, 0x4000, 0x2000)))
    decoded = decode_image(data, CONFIG)
    assert [decoded.getpixel((x, 0)) for x in range(2)] == [(0, 0, 0), WHITE]


@pytest.mark.parametrize("image_format", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_not_clipped(image_format: str) -> None:
    levels = np.array([[0, 0x4000, 0x8000, 0xFFFF]], dtype=np.uint16)
    decoded = decode_image(encoded(Image.fromarray(levels), image_format), CONFIG)
    assert [decoded.getpixel((x, 0))[0] for x in range(4)] == [0, 64, 128, 255]


def test_16_bit_colour_is_scaled() -> None:
    decoded = decode_image(png(1, 1, 16, 2, b"\x00" + struct.pack(">3H", 0xFFFF, 0x8000, 0)), CONFIG)
    assert decoded.getpixel((0, 0)) == (255, 128, 0)


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 100.0, 255.0], [0, 100, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([0.0, 500.0, 1000.0], [0, 128, 255]),
        ([float("nan"), 0.0, 1.0], [0, 0, 255]),
    ],
)
def test_float_samples_are_scaled_by_their_range(levels: list[float], expected: list[int]) -> None:
    image = Image.fromarray(np.array([levels], dtype=np.float32))
    decoded = decode_image(encoded(image, "TIFF"), CONFIG)
    assert [decoded.getpixel((x, 0))[0] for x in range(3)] == expected


@pytest.mark.parametrize(
    ("levels", "expected"),
    [([0, 128, 255], [0, 128, 255]), ([0, 32768, 65535], [0, 128, 255]), ([-5, 0, 5], [0, 128, 255])],
)
def test_32_bit_samples_are_scaled_by_their_range(levels: list[int], expected: list[int]) -> None:
    image = Image.fromarray(np.array([levels], dtype=np.int32))
    decoded = decode_image(encoded(image, "TIFF"), CONFIG)
    assert [decoded.getpixel((x, 0))[0] for x in range(3)] == expected


@pytest.mark.parametrize("image_format", ["JPEG", "TIFF"])
def test_cmyk_becomes_rgb(image_format: str) -> None:
    options = {"quality": 95} if image_format == "JPEG" else {}
    assert_close(decode_image(encoded(quadrants().convert("CMYK"), image_format, **options), CONFIG), quadrants(), 12)


def test_black_and_white_becomes_rgb() -> None:
    assert_close(decode_image(encoded(Image.new("1", (9, 5), 1), "PNG"), CONFIG), Image.new("RGB", (9, 5), WHITE))


def test_a_colour_profile_is_converted_to_srgb() -> None:
    data = encoded(Image.new("RGB", (4, 4), (64, 64, 64)), "PNG", icc_profile=_linear_rgb_profile())
    assert decode_image(data, CONFIG).getpixel((0, 0)) == pytest.approx((137, 137, 137), abs=2)


def test_a_colour_profile_that_does_not_fit_is_ignored() -> None:
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    for profile in (lab, b"x" * 200, b"x"):
        assert_close(decode_image(encoded(quadrants(), "PNG", icc_profile=profile), CONFIG), quadrants())


def _linear_rgb_profile() -> bytes:
    """An RGB profile with sRGB's primaries and no gamma, made from the sRGB profile by replacing its curves."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    description = profile.find("sRGB".encode("utf-16-be"))
    while description >= 0:
        profile[description : description + 8] = "Line".encode("utf-16-be")
        description = profile.find("sRGB".encode("utf-16-be"))
    (num_tags,) = struct.unpack_from(">I", profile, 128)
    for tag in range(num_tags):
        name, offset, _ = struct.unpack_from(">4sII", profile, 132 + 12 * tag)
        if name in (b"rTRC", b"gTRC", b"bTRC"):  # a parametric curve: type 0 is a power, here of 1
            profile[offset : offset + 16] = b"para" + bytes(4) + struct.pack(">HHI", 0, 0, 0x10000)
    return bytes(profile)


def test_animated_and_multi_page_files_are_their_first_frame() -> None:
    pages = [Image.new("RGB", (16, 16), color) for color in (RED, (0, 255, 0), (0, 0, 255))]
    for image_format in ("GIF", "WEBP", "TIFF", "PNG"):
        data = encoded(pages[0], image_format, save_all=True, append_images=pages[1:])
        assert probed(data).num_frames == 1
        assert_close(decode_image(data, CONFIG), pages[0])


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1)])
def test_extreme_shapes_are_read(size: tuple[int, int]) -> None:
    data = encoded(Image.new("RGB", size), "PNG")
    assert decode_image(data, CONFIG).size == (probed(data).width, probed(data).height) == size


# --------------------------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------------------------


def test_a_small_file_of_many_pixels_is_refused_from_its_header() -> None:
    bomb = png(50_000, 50_000, 8, 2, b"")
    for read in (probed, lambda data: decode_image(data, CONFIG)):
        with pytest.raises(MediaError, match="50000 x 50000 pixels"):
            read(bomb)


def test_a_small_tiff_of_huge_tiles_is_refused_from_its_header() -> None:
    values = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), (322, 65_536), (323, 32_768)]
    values += [(324, 8), (325, 100)]  # where the tile's bytes are, and how many
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values)
    data = b"II*\0" + struct.pack("<IH", 8, len(values)) + directory + bytes(4)
    for read in (probed, lambda data: decode_image(data, CONFIG)):
        with pytest.raises(MediaError, match="65536 x 32768 pixels"):
            read(data)


def test_the_pixel_limit_is_the_configured_one() -> None:
    data = encoded(Image.new("RGB", (100, 100)), "PNG")
    assert probed(data, MediaConfig(max_pixels=10_000)).width == 100
    with pytest.raises(MediaError, match="at most 9999 pixels") as error:
        probed(data, MediaConfig(max_pixels=9_999))
    assert error.value.param == "messages[0].content[1]"
    with pytest.raises(MediaError, match="at most 9999 pixels"):
        decode_image(data, MediaConfig(max_pixels=9_999))


def test_a_limit_above_pillows_own_is_honoured() -> None:
    data = png(20_000, 20_000, 1, 0, b"")
    assert probed(data, MediaConfig(max_pixels=400_000_000)).width == 20_000


def test_bytes_are_counted_again() -> None:
    with pytest.raises(MediaError, match="the limit is 10 bytes"):
        probed(encoded(quadrants(), "PNG"), MediaConfig(max_bytes=10))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not an image"),
        (b"\x00" * 100, "not an image"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b'{"error": "not found"}', "web page"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "vector"),
        (b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic", "HEIC"),
        (b"\x00\x00\x00\x18ftypmp42\x00\x00\x00\x00mp42isom", "send it as video_url"),
        (b"\x1a\x45\xdf\xa3\x01\x00\x00\x00\x00\x00\x00\x1f", "send it as video_url"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not an image"),
        (b"%PDF-1.7\n", "not an image"),
        (b"\x89PNG\r\n\x1a\n", "header is damaged"),
        (b"\xff\xd8\xff\xe0", "header is damaged"),
    ],
)
def test_what_is_not_an_image_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    for read in (probed, lambda data: decode_image(data, CONFIG, param="messages[0].content[1]")):
        with pytest.raises(MediaError, match=reason) as error:
            read(data)
        assert error.value.param == "messages[0].content[1]"


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_a_truncated_image_is_an_error_of_the_client(image_format: str) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    data = encoded(noise, image_format)
    for share in (0.2, 0.5, 0.9):
        with pytest.raises(MediaError):
            decode_image(data[: int(len(data) * share)], CONFIG)


@given(data=st.data(), image_format=st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"]))
@settings(deadline=None, max_examples=300)
def test_damaged_files_are_read_or_refused_and_never_crash(data: st.DataObject, image_format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = bytearray(
        encoded(quadrants(24, 16), image_format, **({} if image_format in ("GIF", "BMP") else {"exif": exif}))
    )
    for _ in range(data.draw(st.integers(1, 8))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    small = MediaConfig(max_pixels=1_000_000)
    try:
        info = probed(bytes(file), small)
        decoded = decode_image(bytes(file), small)
    except MediaError:
        return
    assert decoded.size == (info.width, info.height)
