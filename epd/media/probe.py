"""What a media file is, from its header: enough to lay out a prompt, before anything is spent on decoding it.

Blocking, milliseconds for an image and a pass over the container for a clip. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epd.config import MediaConfig
from epd.errors import MediaError
from epd.media.clip_frames import frame_size
from epd.media.image_file import opened_image, oriented_size
from epd.media.video_file import check_clip_size, index_clip, limit_decoder, opened_clip
from epd.types import Modality


@dataclass(frozen=True, slots=True)
class MediaInfo:
    """A media file as it will be seen: ``width`` and ``height`` after EXIF orientation or the clip's rotation.

    ``frame_times_s`` holds, for a clip, when each frame is shown, from 0.0; for an image it is empty, ``num_frames`` is
    1 and the rest is 0.
    """

    modality: Modality
    width: int
    height: int
    num_frames: int = 1
    duration_s: float = 0.0
    fps: float = 0.0
    frame_times_s: tuple[float, ...] = ()


def probe(data: bytes, *, modality: Modality, param: str | None, config: MediaConfig) -> MediaInfo:
    """Read what ``data`` is, as an image or as a clip: a GIF is its first frame as the one and a clip as the other.

    Raises:
        MediaError: not a supported file of that kind, damaged as far as can be seen, or over a limit.
    """
    if len(data) > config.max_bytes:
        raise MediaError(f"the media is {len(data)} bytes; the limit is {config.max_bytes} bytes", param)
    if modality is Modality.IMAGE:
        with opened_image(data, config, param) as image:
            width, height = oriented_size(image)
        return MediaInfo(modality, width, height)
    index = index_clip(data, config, param)
    with opened_clip(data, param) as (container, stream):
        limit_decoder(stream, config, param)
        # The rotation is known to the decoder only, so one frame is decoded, which also shows that the clip is sound.
        first = next(container.decode(stream), None)
        if first is None:
            raise MediaError("the video has no frames that can be decoded", param)
        width, height = frame_size(first)
    check_clip_size(width, height, 1, config, param)
    return MediaInfo(modality, width, height, len(index.pts), index.duration_s, index.fps, index.times_s)


def check_sampling(info: MediaInfo, timestamps_s: Sequence[float], *, param: str | None, config: MediaConfig) -> None:
    """Check the frames to be taken of a clip against the limits, before anything is decoded. Raises ``MediaError``."""
    check_clip_size(info.width, info.height, len(timestamps_s), config, param)
