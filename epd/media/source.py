"""From the string that a client sent as a media URL to bytes: ``data:`` URLs here, http and https by the fetcher.

Knows nothing of what the bytes are. Sizes are counted before anything is decoded.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote, unquote_to_bytes

from epd.config import MediaConfig
from epd.errors import MediaError
from epd.media.fetch import Fetcher

_WHITESPACE = dict.fromkeys(map(ord, " \t\r\n\f"))
_OFF_LOOP_CHARS = 1 << 20
"""A ``data:`` URL longer than this is decoded in a thread, so that the event loop goes on."""


@dataclass(frozen=True, slots=True)
class MediaSource:
    """Where one media part of a request comes from. ``param`` names the part of the body."""

    url: str
    param: str | None = None


async def resolve(url: str, *, param: str | None, config: MediaConfig, fetcher: Fetcher) -> bytes:
    """Return the bytes of one media part.

    Raises:
        MediaError: a malformed, refused or too large source.
        MediaFetchError: a fetch failed in a way that may pass.
    """
    url = url.lstrip()
    if url[:5].lower() != "data:":
        return await fetcher.fetch(url, param=param)
    if len(url) <= _OFF_LOOP_CHARS:
        return decode_data_url(url, param=param, config=config)
    return await asyncio.to_thread(decode_data_url, url, param=param, config=config)


async def resolve_all(sources: Sequence[MediaSource], *, config: MediaConfig, fetcher: Fetcher) -> list[bytes]:
    """Return the bytes of all media parts of one request, in order, side by side; the same URL is fetched once.

    The first failure cancels the rest. Raises as ``resolve`` does, and ``MediaError`` for too many parts.
    """
    if len(sources) > config.max_items:
        raise MediaError(
            f"the request has {len(sources)} images and videos; at most {config.max_items} are allowed",
            sources[config.max_items].param,
        )
    tasks: dict[str, asyncio.Task[bytes]] = {}
    for source in sources:
        if source.url not in tasks:
            resolving = resolve(source.url, param=source.param, config=config, fetcher=fetcher)
            tasks[source.url] = asyncio.ensure_future(resolving)
    try:
        await asyncio.gather(*tasks.values())
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    return [tasks[source.url].result() for source in sources]


def decode_data_url(url: str, *, param: str | None, config: MediaConfig) -> bytes:
    """Return the bytes that a ``data:`` URL carries. Raises ``MediaError``.

    The media type is ignored: the bytes say what they are. Base64 is strict in its alphabet; whitespace, escaped
    characters and missing padding are forgiven, since clients send them.
    """
    header, comma, payload = url[5:].partition(",")
    if not comma:
        raise MediaError("the data: URL has no comma before its data", param)
    is_base64 = header.rpartition(";")[2].strip().lower() == "base64"
    data = _decode_base64(payload, param, config) if is_base64 else _decode_percent(payload, param, config)
    if not data:
        raise MediaError("the data: URL is empty", param)
    return data


def _decode_base64(payload: str, param: str | None, config: MediaConfig) -> bytes:
    if "%" in payload:
        payload = unquote(payload, errors="replace")
    if any(character in payload for character in " \t\r\n\f"):
        payload = payload.translate(_WHITESPACE)
    payload = payload.rstrip("=")
    _check_size(len(payload) * 3 // 4, param, config)
    try:
        return binascii.a2b_base64(payload.encode("ascii") + b"=" * (-len(payload) % 4), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise MediaError("the data: URL is not valid base64", param) from error


def _decode_percent(payload: str, param: str | None, config: MediaConfig) -> bytes:
    _check_size(len(payload) - 2 * payload.count("%"), param, config)
    data = unquote_to_bytes(payload)
    _check_size(len(data), param, config)
    return data


def _check_size(num_bytes: int, param: str | None, config: MediaConfig) -> None:
    if num_bytes > config.max_bytes:
        raise MediaError(f"the media is {num_bytes} bytes; the limit is {config.max_bytes} bytes", param)
