"""Blocks of this replica that are open to a writer, and which of them have been written in full.

Owns the ids and what has been noted of each. Knows nothing of transports, and frees no memory: whether a writer may
still be at it is for its caller to know.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from epd.errors import HandleExpiredError, TransferError

__all__ = ["TargetTable"]


@dataclass(slots=True)
class _Target:
    block_ids: tuple[int, ...]
    on_close: Callable[[], None]
    has_landed: bool = False


class TargetTable:
    """Thread-safe table of targets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._targets: dict[str, _Target] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._targets)

    def open(self, block_ids: Iterable[int], on_close: Callable[[], None]) -> str:
        """Add a target and return its id, which cannot be guessed. Raises ``TransferError`` once the table is closed.

        ``on_close`` is called exactly once, when the target is closed, outside the table's lock.
        """
        target_id = uuid.uuid4().hex
        with self._lock:
            if self._is_closed:
                raise TransferError("this replica is shutting down and accepts nothing any more")
            self._targets[target_id] = _Target(tuple(block_ids), on_close)
        return target_id

    def block_ids(self, target_id: str) -> tuple[int, ...]:
        """Raises ``HandleExpiredError`` for a target that is closed."""
        return self._find(target_id).block_ids

    def note_landed(self, target_ids: Iterable[str]) -> None:
        """Note what writers say that they have finished. Ids of closed targets, and made-up ones, are ignored."""
        with self._lock:
            for target_id in target_ids:
                if target_id in self._targets:
                    self._targets[target_id].has_landed = True

    def has_landed(self, target_id: str) -> bool:
        """Raises ``HandleExpiredError`` for a target that is closed."""
        return self._find(target_id).has_landed

    def close(self, target_id: str) -> None:
        """Forget a target. Unknown and closed ids are ignored."""
        with self._lock:
            target = self._targets.pop(target_id, None)
        if target is not None:
            target.on_close()

    def close_all(self) -> None:
        """Forget every target and take no new ones."""
        with self._lock:
            self._is_closed = True
            targets, self._targets = self._targets, {}
        for target in targets.values():
            target.on_close()

    def _find(self, target_id: str) -> _Target:
        with self._lock:
            target = self._targets.get(target_id)
        if target is None:
            raise HandleExpiredError(f"target {target_id} is closed: nothing more is to be written there")
        return target
