"""Cutting a growing text at the first stop string. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from epd.errors import InvalidRequestError


class StopMatcher:
    """Passes text on, keeping back whatever may turn out to be the start of a stop string.

    The stop string that is complete first counts; of several complete at once, the longest. So the result does not
    depend on how the text was cut into pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise InvalidRequestError("stop strings must not be empty", "stop")
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text; return what can no longer be part of a stop string. After a match, nothing."""
        if self.matched is not None:
            return ""
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self.matched = min(matches)
            self._held = ""
            return text[:start]
        keep = self._longest_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return what was kept back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _longest_start(self, text: str) -> int:
        """Return the length of the longest end of the text with which some stop string starts."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
