"""Opening encoded clips: which containers and codecs, how large, and when each frame is shown. Decodes nothing.

The container is recognised here and FFmpeg told which demuxer to use, because some of the others follow references to
files and network addresses. Timestamps count from the first frame shown.
"""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import av.error

from epd.config import MediaConfig
from epd.errors import MediaError

_CONTAINER_NAMES = "mp4, mov, webm, mkv, avi, MPEG-TS or GIF"
_MOV_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})
_DECODERS = frozenset(
    {
        *("h264", "hevc", "av1", "libdav1d", "libaom-av1", "vp8", "libvpx", "vp9", "libvpx-vp9"),
        *("mpeg4", "mpeg1video", "mpeg2video", "h263", "mjpeg", "prores", "gif"),
    }
)
_MAX_FRAMES_PER_S = 240
"""Bounds the index of a clip, over the longest allowed duration; more is no camera."""
_TOLERANCE_S = 1e-3
"""Containers round frame times to their own ticks, commonly to a millisecond, in either direction."""
_FFMPEG_ERRORS = (av.error.FFmpegError, OSError, ValueError, EOFError, LookupError, RuntimeError, AttributeError)


@dataclass(frozen=True, slots=True)
class ClipIndex:
    """When each frame of a clip is shown, ascending and distinct, in ticks of ``time_base``; which are keyframes."""

    pts: tuple[int, ...]
    keyframe_pts: tuple[int, ...]
    time_base: Fraction
    duration_s: float

    @property
    def times_s(self) -> tuple[float, ...]:
        """Seconds from the first frame to each."""
        first, tick_s = self.pts[0], float(self.time_base)
        return tuple((pts - first) * tick_s for pts in self.pts)

    @property
    def fps(self) -> float:
        """Frames per second, averaged over the clip."""
        return len(self.pts) / self.duration_s

    def keyframe_before(self, pts: int) -> int | None:
        """Return the last keyframe shown at or before ``pts``."""
        position = bisect_right(self.keyframe_pts, pts)
        return self.keyframe_pts[position - 1] if position else None


def frames_at(times_s: Sequence[float], timestamps_s: Sequence[float]) -> list[int]:
    """Return, for each timestamp, the index of the frame that is on screen then: the last one at or before it.

    ``times_s`` ascends. A timestamp before the first frame takes the first. Times are compared to a millisecond, except
    that the exact time of a frame always means that frame.
    """
    indexes = []
    for timestamp_s in timestamps_s:
        exact = bisect_left(times_s, timestamp_s)
        if exact < len(times_s) and times_s[exact] == timestamp_s:
            indexes.append(exact)
        else:
            indexes.append(max(bisect_right(times_s, timestamp_s + _TOLERANCE_S) - 1, 0))
    return indexes


@contextmanager
def opened_clip(data: bytes, param: str | None) -> Iterator[tuple[Any, Any]]:
    """Open a clip: a PyAV container and its video stream. What FFmpeg raises inside comes out as ``MediaError``."""
    try:
        with av.open(
            io.BytesIO(data),
            mode="r",
            format=_demuxer(data, param),
            options={"protocol_whitelist": "none", "codec_whitelist": ",".join(_DECODERS)},
            metadata_errors="ignore",
        ) as container:
            yield container, _video_stream(container, param)
    except MemoryError as error:
        raise MediaError("the video needs more memory than there is", param) from error
    except _FFMPEG_ERRORS as error:
        raise MediaError("the video is damaged or truncated", param) from error


def index_clip(data: bytes, config: MediaConfig, param: str | None) -> ClipIndex:
    """Read the timestamps of all frames from the container, within the limits on duration. Raises ``MediaError``."""
    max_frames = int(config.max_video_duration_s * _MAX_FRAMES_PER_S)
    last_duration: dict[int, int] = {}
    keyframes: set[int] = set()
    start: int | None = None
    with opened_clip(data, param) as (container, stream):
        time_base = Fraction(stream.time_base)
        average_rate = stream.average_rate
        for packet in container.demux(stream):
            pts = packet.pts if packet.pts is not None else packet.dts
            if pts is None or packet.size == 0:
                continue
            # Nothing before the first keyframe can be decoded, whatever a cut recording holds there.
            start = pts if start is None and packet.is_keyframe else start
            if start is None or pts < start or packet.is_discard:
                continue
            last_duration[pts] = packet.duration or 0
            if packet.is_keyframe:
                keyframes.add(pts)
            if len(last_duration) > max_frames:
                raise MediaError(f"the video has more than {max_frames} frames", param)
    if not last_duration:
        raise MediaError("the video has no frames", param)
    pts_in_order = tuple(sorted(last_duration))
    ticks = pts_in_order[-1] - pts_in_order[0]
    tail = last_duration[pts_in_order[-1]] or (ticks / (len(pts_in_order) - 1) if ticks else 0)
    duration_s = float((ticks + tail) * time_base) or float(1 / (average_rate or 1))
    if duration_s > config.max_video_duration_s:
        raise MediaError(
            f"the video is {duration_s:.1f} s long; at most {config.max_video_duration_s:g} s are allowed", param
        )
    return ClipIndex(pts_in_order, tuple(sorted(keyframes)), time_base, duration_s)


def check_clip_size(width: int, height: int, num_frames: int, config: MediaConfig, param: str | None) -> None:
    """Check what would be decoded of a clip against the limits. Raises ``MediaError``."""
    if width < 1 or height < 1:
        raise MediaError("the video has no pixels", param)
    if width * height > config.max_pixels:
        raise MediaError(
            f"the video has {width} x {height} pixels; at most {config.max_pixels} pixels are allowed", param
        )
    if num_frames > config.max_video_frames:
        raise MediaError(f"{num_frames} frames of the video are to be read; {config.max_video_frames} at most", param)
    if num_frames * width * height > config.max_video_pixels:
        raise MediaError(
            f"{num_frames} frames of {width} x {height} pixels are more than the {config.max_video_pixels} pixels "
            "that may be read of one video; send it smaller or shorter",
            param,
        )


def limit_decoder(stream: Any, config: MediaConfig, param: str | None) -> None:
    """Check the size in the container, and keep the decoder from larger frames. Raises ``MediaError``."""
    check_clip_size(stream.codec_context.width, stream.codec_context.height, 1, config, param)
    stream.codec_context.options = {"max_pixels": str(config.max_pixels)}


def _demuxer(data: bytes, param: str | None) -> str:
    if data[4:8] in _MOV_BOXES:
        return "mov"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if data.startswith(b"RIFF") and data[8:12] == b"AVI ":
        return "avi"
    if data.startswith(b"\x47") and data[188:189] == b"\x47":
        return "mpegts"
    if data.startswith((b"\xff\xd8\xff", b"\x89PNG", b"BM", b"RIFF", b"II*\0", b"MM\0*")):
        raise MediaError("this is an image; send it as image_url", param)
    raise MediaError(f"this is not a video in a supported format ({_CONTAINER_NAMES})", param)


def _video_stream(container: Any, param: str | None) -> Any:
    for stream in container.streams.video:
        if not stream.disposition & av.stream.Disposition.attached_pic:
            if stream.codec_context is None or stream.codec_context.name not in _DECODERS:
                raise MediaError("the video uses a codec that is not supported", param)
            return stream
    raise MediaError("the file has no video track", param)
