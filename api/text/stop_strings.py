"""Stop strings, matched on the accumulated text and held back only as long as they can still come true.

The matcher holds back the longest suffix that is a true prefix of a stop string. So no half of a stop string is shown, and no
text is lost when it turns out to be something else. The match that is complete first wins; of those complete at the same character,
the one listed first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`text`: what may still be shown, cut at the stop string (or behind it, when it is to be included)."""

    stop: str
    text: str


class StopMatcher:
    """Costs a constant number of steps a character, however long the stop strings are (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        assert all(stop), "an empty stop string matches everywhere"
        self._stop = list(stop)
        self._borders = [_borders(word) for word in stop]
        self._firsts = {word[0] for word in stop}
        self._include_stop = include_stop
        self._lengths = [0] * len(stop)  # by stop string: of its longest prefix that the text ends with
        self._held = ""

    def push(self, text: str, armed: bool = True) -> str | StopMatch:
        """The text that is safe to show now. Not `armed` (below min_tokens): stop strings that end inside `text` do not count."""
        if not self._held and self._firsts.isdisjoint(text):
            return text
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            complete = self._advance(buffer[end - 1])
            if armed and complete is not None:
                self._held = ""
                return StopMatch(complete, buffer[: end if self._include_stop else end - len(complete)])
        shown = len(buffer) - max(self._lengths)
        self._held = buffer[shown:]
        return buffer[:shown]

    def flush(self) -> str:
        """The output ended otherwise: what was held is text."""
        held, self._held = self._held, ""
        self._lengths = [0] * len(self._stop)
        return held

    def _advance(self, character: str) -> str | None:
        """Take one character. The first of the stop strings that it completes."""
        complete = None
        for place, (word, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
            length = self._lengths[place]
            while length and word[length] != character:
                length = borders[length - 1]
            if word[length] == character:
                length += 1
            if length == len(word):
                complete = complete or word
                length = borders[-1]
            self._lengths[place] = length
        return complete


@lru_cache(maxsize=64)
def _borders(word: str) -> array[int]:
    """[len(word)] for each prefix, the length of the longest shorter prefix that it ends with."""
    borders = array("i", [0])
    for character in word[1:]:
        length = borders[-1]
        while length and word[length] != character:
            length = borders[length - 1]
        borders.append(length + 1 if word[length] == character else 0)
    return borders
