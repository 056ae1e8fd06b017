"""Which block holds which prefix: a map from chained content keys to block ids.

Knows nothing of reference counts (``BlockPool``) or tensors. A key covers the tokens of a block, everything before
them, and the media that stand at placeholder positions, so the same text with another image never matches.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from epd.types import MediaItem

_ROOT = b"epd-prefix/1"


def block_key(parent: bytes | None, token_ids: Sequence[int], start: int, items: Sequence[MediaItem]) -> bytes:
    """Return the key of a full block whose first token is number ``start``.

    ``parent`` is the key of the block before it. Media enter with the offset of the block inside the item, because a
    placeholder token says nothing about which row of which image it stands for.
    """
    digest = hashlib.blake2b(parent or _ROOT, digest_size=16)
    digest.update(array("q", token_ids).tobytes())
    end = start + len(token_ids)
    for item in items:
        if item.placeholder.offset < end and start < item.placeholder.end:
            digest.update(f"|{item.placeholder.offset - start}:{item.mm_hash}".encode())
    return digest.digest()


def extend_block_keys(
    keys: list[bytes], token_ids: Sequence[int], num_tokens: int, block_size: int, items: Sequence[MediaItem]
) -> None:
    """Append to ``keys`` until every full block of the first ``num_tokens`` tokens has one."""
    for index in range(len(keys), num_tokens // block_size):
        start = index * block_size
        parent = keys[-1] if keys else None
        keys.append(block_key(parent, token_ids[start : start + block_size], start, items))


class PrefixCache:
    """Content key -> block id. One block per key: the first to be filled stays, later equal ones are not listed."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of ``keys``."""
        blocks = []
        for key in keys:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def insert(self, key: bytes, block_id: int) -> None:
        """List a full block, whose contents the caller vouches for."""
        if key not in self._block_of:
            self._block_of[key] = block_id
            self._key_of[block_id] = key

    def forget(self, block_id: int) -> None:
        """Drop a block that is about to be overwritten."""
        key = self._key_of.pop(block_id, None)
        if key is not None:
            del self._block_of[key]

    def clear(self) -> None:
        self._block_of.clear()
        self._key_of.clear()
