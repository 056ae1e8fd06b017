"""The key of a media item's embedding. Knows nothing of who stores what under it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from epd.types import Modality

_FORMAT = b"epd-media-1"


def media_hash(data: bytes, *, fingerprint: str, detail: str, timestamps_s: Sequence[float], modality: Modality) -> str:
    """Return a hex digest over everything that changes an embedding.

    That is the encoded bytes, the model and processor (``fingerprint``, see ``ModelFamily``), how the bytes are read
    (``modality``: a GIF is an image or a clip), ``detail``, and which frames are taken. Every field goes in with its
    length, so that no two different items write the same bytes. Nothing that a client names takes part.
    """
    digest = hashlib.sha256()
    fields = (
        _FORMAT,
        fingerprint.encode(),
        modality.value.encode(),
        detail.encode(),
        struct.pack(f">{len(timestamps_s)}d", *timestamps_s),
        data,
    )
    for field in fields:
        digest.update(struct.pack(">Q", len(field)))
        digest.update(field)
    return digest.hexdigest()
