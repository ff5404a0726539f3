"""Stop strings, matched on the accumulated text and held back only as long as they can still come true.

What is held is the longest suffix that is a true prefix of a stop string, nothing more; so no half of a stop string is shown and no
text is lost when it turns out to be something else. The match that is complete first wins; of those complete at the same character,
the one listed first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`text`: what may still be shown, cut at the stop string (or behind it, when it is to be included)."""

    stop: str
    text: str


class StopMatcher:
    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        assert all(stop), "an empty stop string matches everywhere"
        self._stop = list(stop)
        self._include_stop = include_stop
        self._longest = max((len(word) for word in stop), default=0)
        self._held = ""

    def push(self, text: str, armed: bool = True) -> str | StopMatch:
        """The text that is safe to show now. Not `armed` (below min_tokens): stop strings that end inside `text` do not count."""
        if not self._stop or not text:
            return text
        buffer = self._held + text
        if armed and (match := self._find(buffer)) is not None:
            self._held = ""
            return match
        held = self._prefix_len(buffer)
        self._held = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held]

    def flush(self) -> str:
        """The output ended otherwise: what was held is text."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str) -> StopMatch | None:
        end, word = len(buffer) + 1, ""
        for candidate in self._stop:
            # What is held was seen before, unarmed perhaps: only a match that ends in the new text counts.
            start = buffer.find(candidate, max(0, len(self._held) + 1 - len(candidate)))
            if start >= 0 and start + len(candidate) < end:
                end, word = start + len(candidate), candidate
        if not word:
            return None
        return StopMatch(word, buffer[: end if self._include_stop else end - len(word)])

    def _prefix_len(self, buffer: str) -> int:
        for size in range(min(self._longest - 1, len(buffer)), 0, -1):
            suffix = buffer[len(buffer) - size :]
            if any(len(word) > size and word.startswith(suffix) for word in self._stop):
                return size
        return 0
