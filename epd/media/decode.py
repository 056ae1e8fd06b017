"""Encoded media to RGB frames, in the encoder. The limits are checked again: the encoder does not trust its callers.

Blocking and CPU-bound; Pillow and FFmpeg release the GIL. Knows nothing of models, prompts or the network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from PIL import Image

from epd.config import MediaConfig
from epd.errors import MediaError
from epd.media.clip_frames import frame_size, frame_to_rgb
from epd.media.color import orient, scaled_transparency, to_rgb
from epd.media.image_file import check_image_size, opened_image, orientation_of
from epd.media.video_file import ClipIndex, check_clip_size, frames_at, index_clip, limit_decoder, opened_clip


def decode_image(data: bytes, config: MediaConfig, *, param: str | None = None) -> Image.Image:
    """Return an image as it is meant to be seen, in 8-bit sRGB: upright, on white where it is transparent.

    Of animated and multi-page files the first frame or page. Raises ``MediaError``.
    """
    with opened_image(data, config, param) as image:
        orientation = orientation_of(image)
        transparency = scaled_transparency(image)
        image.load()
        check_image_size(image.width, image.height, config, param)
        if transparency is not None:
            image.info["transparency"] = transparency
        return orient(to_rgb(image), orientation)


def decode_video(
    data: bytes,
    timestamps_s: Sequence[float],
    config: MediaConfig,
    *,
    param: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Image.Image]:
    """Return one RGB frame for each timestamp, all of one size: the frame on screen at that time, upright.

    Timestamps are seconds from the first frame, in any order; the same frame may be taken twice. Raises ``MediaError``,
    also when decoding takes longer than ``decode_timeout_s``.
    """
    if not timestamps_s:
        raise ValueError("no timestamps: a clip is decoded frame by frame")
    deadline_s = clock() + config.decode_timeout_s
    index = index_clip(data, config, param)
    wanted = [index.pts[i] for i in frames_at(index.times_s, timestamps_s)]

    def take(*, jumping: bool) -> dict[int, Image.Image] | None:
        with opened_clip(data, param) as (container, stream):
            limit_decoder(stream, config, param)
            cursor = _Cursor(container, stream, index, jumping=jumping)
            images = {}
            for pts in sorted(set(wanted)):
                frame = cursor.frame_at(pts, lambda: _check_time(clock() > deadline_s, config, param))
                if frame is None:
                    return None
                check_clip_size(*frame_size(frame), len(timestamps_s), config, param)
                images[pts] = frame_to_rgb(frame)
            return images

    images = take(jumping=True) or take(jumping=False)
    if images is None:
        raise MediaError("the video is damaged: a frame could not be decoded", param)
    size = images[min(images)].size
    for pts, image in images.items():
        if image.size != size:  # the resolution changed in mid-stream
            images[pts] = image.resize(size, Image.Resampling.BICUBIC)
    return [images[pts] for pts in wanted]


def _check_time(is_over: bool, config: MediaConfig, param: str | None) -> None:
    if is_over:
        raise MediaError(f"the video takes longer than {config.decode_timeout_s:g} s to decode", param)


class _Cursor:
    """Walks forward through an opened clip, jumping to a keyframe where that saves decoding.

    After a jump only the wanted frame itself is believed: containers with poor indexes land elsewhere. The caller then
    starts again with a cursor that does not jump, which accepts the last frame before a missing one.
    """

    def __init__(self, container: Any, stream: Any, index: ClipIndex, *, jumping: bool) -> None:
        self._container = container
        self._stream = stream
        self._index = index
        self._jumping = jumping
        self._frames: Iterator[Any] = container.decode(stream)
        self._held: Any = None
        self._ahead: Any = None

    def frame_at(self, pts: int, check: Callable[[], None]) -> Any:
        """Return the frame shown at ``pts``, or ``None``; calls come with ascending ``pts``.

        ``check`` is called before each frame that is decoded, and may raise.
        """
        if self._jumping:
            keyframe = self._index.keyframe_before(pts)
            position = self._index.pts[0] if self._held is None else self._held.pts
            if keyframe is not None and keyframe > position:
                self._container.seek(keyframe, stream=self._stream, backward=True)
                self._frames = self._container.decode(self._stream)
                self._held = self._ahead = None
        self._advance(pts, check)
        if self._jumping and self._held is not None and self._held.pts != pts:
            return None
        return self._held

    def _advance(self, pts: int, check: Callable[[], None]) -> None:
        """Decode until the frame at ``pts`` or past it is seen, holding the last one at or before it."""
        while self._held is None or self._held.pts < pts:
            check()
            frame = self._ahead if self._ahead is not None else next(self._frames, None)
            self._ahead = None
            if frame is None:
                return
            if frame.pts is None:
                continue
            if frame.pts > pts:
                self._ahead = frame
                return
            self._held = frame
