"""How many choices a second an engine gets done while it is full: what a place in the queue is worth in seconds."""

from __future__ import annotations

import math

MEMORY = 20.0  # seconds after which a measurement counts 1/e
LEAST_SECONDS = 1.0  # of being full, before the pace is told


class ServiceRate:
    """The mean over the times in which the engine was full, newer ones counting more. Ends make room for what waits."""

    def __init__(self) -> None:
        self._ended = self._seconds = 0.0  # decayed sums over full times
        self._last: tuple[float, int, bool] | None = None  # the look before

    def look(self, now: float, num_ended: int, is_full: bool) -> float:
        """Choices a second; 0.0: not known yet. `now`: a monotonic clock, in seconds; `num_ended`: since the engine's start."""
        if self._last is not None and self._last[2] and is_full:
            elapsed = now - self._last[0]
            decay = math.exp(-elapsed / MEMORY)
            self._ended = self._ended * decay + num_ended - self._last[1]
            self._seconds = self._seconds * decay + elapsed
        self._last = (now, num_ended, is_full)
        return self._ended / self._seconds if self._seconds >= LEAST_SECONDS else 0.0
