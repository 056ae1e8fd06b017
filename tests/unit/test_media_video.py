"""If this fails, the model sees other moments of a clip than its timestamps say, or a clip brings the server down."""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from epd.config import MediaConfig
from epd.errors import MediaError
from epd.media.decode import decode_video
from epd.media.probe import MediaInfo, check_sampling, probe
from epd.media.video_file import frames_at
from epd.types import Modality

CONFIG = MediaConfig()
PARAM = "messages[0].content[0]"
CONTAINERS = [
    ("mp4", "libx264"),
    ("mp4", "mpeg4"),
    ("mp4", "libsvtav1"),
    ("mov", "libx264"),
    ("webm", "libvpx"),
    ("webm", "libvpx-vp9"),
    ("matroska", "libx264"),
    ("avi", "mpeg4"),
    ("mpegts", "libx264"),
    ("gif", "gif"),
]


def clip(
    container_format: str = "mp4",
    codec: str = "libx264",
    *,
    num_frames: int = 24,
    fps: int = 10,
    size: tuple[int, int] = (96, 64),
    times: Sequence[int] | None = None,
    rotation: int = 0,
    keyframe_every: int = 12,
) -> bytes:
    """Frame ``i`` is grey of level ``10 i``, with a white left edge. ``times`` are in ticks of ``1 / fps``."""
    # In a thread of its own: run as root, SVT-AV1's encoder puts the thread that opens it under real-time scheduling,
    # for good, and so every thread that this one starts later. Two that spin for one lock then starve each other.
    with ThreadPoolExecutor(1) as thread:
        encoding = thread.submit(
            _encode, container_format, codec, num_frames, fps, size, times, rotation, keyframe_every
        )
        return encoding.result()


def _encode(
    container_format: str,
    codec: str,
    num_frames: int,
    fps: int,
    size: tuple[int, int],
    times: Sequence[int] | None,
    rotation: int,
    keyframe_every: int,
) -> bytes:
    buffer = io.BytesIO()
    width, height = size
    with av.open(buffer, "w", format=container_format) as container:
        stream: Any = container.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        stream.codec_context.gop_size = keyframe_every
        if codec == "libsvtav1":
            stream.options = {"svtav1-params": "lp=1"}
        if rotation:
            stream.set_display_rotation(rotation)
        for index in range(num_frames if times is None else len(times)):
            pixels = np.full((height, width, 3), 10 * index, np.uint8)
            pixels[:, : width // 4] = 255
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = index if times is None else times[index]
            frame.time_base = Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def probed(data: bytes, config: MediaConfig = CONFIG) -> MediaInfo:
    return probe(data, modality=Modality.VIDEO, param=PARAM, config=config)


def indexes(images: Sequence[Image.Image]) -> list[int]:
    """Which frames of ``clip`` these are."""
    return [round(image.getpixel((image.width - 8, image.height - 8))[0] / 10) for image in images]


@pytest.mark.parametrize(("container_format", "codec"), CONTAINERS)
def test_every_common_container_is_read(container_format: str, codec: str) -> None:
    data = clip(container_format, codec)
    info = probed(data)
    assert (info.width, info.height, info.num_frames) == (96, 64, 24)
    assert info.duration_s == pytest.approx(2.4)
    assert info.fps == pytest.approx(10)
    assert info.frame_times_s == pytest.approx([index / 10 for index in range(24)])
    frames = decode_video(data, info.frame_times_s, CONFIG)
    if codec != "gif":  # its palette is coarse
        assert indexes(frames) == list(range(24))
    assert {frame.size for frame in frames} == {(96, 64)}
    assert {frame.mode for frame in frames} == {"RGB"}


@pytest.mark.parametrize(("container_format", "codec"), CONTAINERS[:-1])
def test_a_timestamp_means_the_frame_on_screen_then(container_format: str, codec: str) -> None:
    data = clip(container_format, codec)
    wanted = (0.0, 0.05, 0.1, 0.19, 1.15, 1.2, 2.29, 2.3, 9.0)
    assert indexes(decode_video(data, wanted, CONFIG)) == [0, 0, 1, 1, 11, 12, 22, 23, 23]


def test_frames_come_in_the_order_asked_and_may_repeat() -> None:
    assert indexes(decode_video(clip(), (2.0, 0.3, 2.0, 0.0), CONFIG)) == [20, 3, 20, 0]


@pytest.mark.parametrize(
    ("container_format", "codec"), [("mp4", "libx264"), ("matroska", "libx264"), ("webm", "libvpx")]
)
def test_variable_frame_rate_is_told_by_time_not_by_count(container_format: str, codec: str) -> None:
    data = clip(container_format, codec, fps=100, times=[0, 3, 50, 51, 52, 200, 290])
    info = probed(data)
    assert info.frame_times_s == pytest.approx([0, 0.03, 0.5, 0.51, 0.52, 2.0, 2.9])
    assert indexes(decode_video(data, [0, 0.4, 0.505, 1.0, 1.99, 2.5, 2.95], CONFIG)) == [0, 1, 2, 4, 4, 5, 6]


@pytest.mark.parametrize("fps", [24, 25, 30, 50, 60])
@pytest.mark.parametrize("container_format", ["webm", "mp4"])
def test_times_computed_from_the_frame_rate_hit_their_frames_though_containers_round(
    fps: int, container_format: str
) -> None:
    codec = "libvpx" if container_format == "webm" else "libx264"
    info = probed(clip(container_format, codec, fps=fps, num_frames=25))
    assert frames_at(info.frame_times_s, [index / info.fps for index in range(25)]) == list(range(25))


@given(st.lists(st.floats(0, 3), min_size=1, max_size=12))
@settings(deadline=None, max_examples=30)
def test_jumping_between_keyframes_finds_the_same_frames_as_reading_all(timestamps_s: list[float]) -> None:
    data = _CLIP_WITH_KEYFRAMES
    assert indexes(decode_video(data, timestamps_s, CONFIG)) == frames_at(probed(data).frame_times_s, timestamps_s)


_CLIP_WITH_KEYFRAMES = clip(num_frames=25, keyframe_every=4)


@pytest.mark.parametrize(("rotation", "edge"), [(0, "left"), (90, "bottom"), (-90, "top"), (180, "right")])
def test_rotation_is_applied_to_size_and_pixels(rotation: int, edge: str) -> None:
    data = clip(rotation=rotation, num_frames=3)
    info = probed(data)
    (image,) = decode_video(data, [0.0], CONFIG)
    assert image.size == (info.width, info.height) == ((64, 96) if abs(rotation) == 90 else (96, 64))
    points = {"left": (4, 32), "right": (-4, 32), "top": (32, 4), "bottom": (32, -4)}
    for name, (x, y) in points.items():
        level = image.getpixel((x % image.width, y % image.height))[0]
        assert (level > 200) == (name == edge), name


def test_transparent_parts_of_a_gif_are_white() -> None:
    frames = [Image.new("RGBA", (16, 16), (255, 0, 0, 0)) for _ in range(2)]
    for index, frame in enumerate(frames):
        frame.paste((255, 0, 0, 255), (0, 0, 4 + index, 16))
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=100, disposal=2)
    (image,) = decode_video(buffer.getvalue(), [0.0], CONFIG)
    assert image.getpixel((1, 8)) == (255, 0, 0)
    assert image.getpixel((12, 8)) == (255, 255, 255)


def test_a_gif_is_its_first_frame_as_an_image_and_a_clip_as_a_video() -> None:
    data = clip("gif", "gif", num_frames=5)
    assert probe(data, modality=Modality.IMAGE, param=None, config=CONFIG) == MediaInfo(Modality.IMAGE, 96, 64)
    assert probed(data).num_frames == 5


def test_a_clip_of_one_frame_has_a_duration_and_a_rate() -> None:
    info = probed(clip(num_frames=1))
    assert info.num_frames == 1
    assert info.duration_s > 0
    assert info.fps > 0


def test_a_recording_cut_before_its_first_keyframe_starts_there() -> None:
    data = clip("mpegts", "libx264", num_frames=24)
    packets = len(data) // 188
    cut = data[: 188 * 3] + data[188 * (packets // 3) :]
    info = probed(cut)
    assert 0 < info.num_frames < 24
    assert info.frame_times_s[0] == 0.0
    assert len(decode_video(cut, info.frame_times_s, CONFIG)) == info.num_frames


# --------------------------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_bytes": 100}, "the limit is 100 bytes"),
        ({"max_pixels": 6143}, "at most 6143 pixels"),
        ({"max_video_duration_s": 2.3}, "2.4 s long; at most 2.3 s"),
    ],
)
def test_a_clip_over_a_limit_is_refused_by_its_header(limits: dict[str, Any], reason: str) -> None:
    with pytest.raises(MediaError, match=reason) as error:
        probed(clip(), MediaConfig(**limits))
    assert error.value.param == PARAM


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_video_frames": 3}, "4 frames of the video"),
        ({"max_video_pixels": 96 * 64 * 4 - 1}, "4 frames of 96 x 64 pixels"),
        ({"max_pixels": 6143}, "at most 6143 pixels"),
    ],
)
def test_what_is_taken_of_a_clip_is_limited_before_and_in_decoding(limits: dict[str, Any], reason: str) -> None:
    data, timestamps_s = clip(), [0.0, 0.5, 1.0, 1.5]
    with pytest.raises(MediaError, match=reason) as error:
        check_sampling(probed(data), timestamps_s, param=PARAM, config=MediaConfig(**limits))
    assert error.value.param == PARAM
    with pytest.raises(MediaError, match=reason):
        decode_video(data, timestamps_s, MediaConfig(**limits), param=PARAM)


def test_a_clip_that_decodes_too_slowly_is_given_up() -> None:
    ticks = iter(range(1000))
    with pytest.raises(MediaError, match="longer than 5 s to decode"):
        decode_video(clip(), [2.3], MediaConfig(decode_timeout_s=5), clock=lambda: float(next(ticks)))


def test_a_file_with_too_many_frames_is_refused_while_counting() -> None:
    with pytest.raises(MediaError, match="more than 2 frames"):
        probed(clip(), MediaConfig(max_video_duration_s=0.01))


def audio_only() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a video"),
        (b"\x00" * 300, "not a video"),
        (PLAYLIST, "not a video"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "not a video"),
        (b"<html>", "not a video"),
        (b"\xff\xd8\xff\xe0" + b"\x00" * 50, "send it as image_url"),
        (b"\x89PNG\r\n\x1a\n", "send it as image_url"),
        (b"\x00\x00\x00\x18ftypmp42\x00\x00\x00\x00mp42isom", "damaged or truncated"),
        (b"\x1a\x45\xdf\xa3" + b"\x01" * 64, "damaged or truncated"),
        (audio_only(), "no video track"),
    ],
)
def test_what_is_not_a_clip_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    for read in (probed, lambda data: decode_video(data, [0.0], CONFIG, param=PARAM)):
        with pytest.raises(MediaError, match=reason) as error:
            read(data)
        assert error.value.param == PARAM


def test_a_codec_off_the_list_is_refused() -> None:
    with pytest.raises(MediaError, match="codec that is not supported"):
        probed(clip("avi", "ffv1"))


def test_a_truncated_mp4_is_refused() -> None:
    with pytest.raises(MediaError):
        probed(clip()[:-200])


@given(data=st.data(), kind=st.sampled_from(range(5)))
@settings(deadline=None, max_examples=150)
def test_damaged_clips_are_read_or_refused_and_never_crash(data: st.DataObject, kind: int) -> None:
    file = bytearray(_SOUND_CLIPS[kind])
    for _ in range(data.draw(st.integers(1, 8))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    small = MediaConfig(max_pixels=1_000_000, max_video_pixels=4_000_000)
    try:
        info = probed(bytes(file), small)
        timestamps_s = (0.0, info.duration_s / 2, info.duration_s)
        frames = decode_video(bytes(file), timestamps_s, small)
    except MediaError:
        return
    assert len(frames) == len(timestamps_s)


_SOUND_CLIPS = [
    clip(container_format, codec, num_frames=6)
    for container_format, codec in (
        ("mp4", "libx264"),
        ("webm", "libvpx"),
        ("avi", "mpeg4"),
        ("gif", "gif"),
        ("mpegts", "libx264"),
    )
]
