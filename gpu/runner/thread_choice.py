"""How many threads compute a short step, all or one: what steps of its size took tells.

Threads that share a step meet after each product, about two hundred times, and the helpers' cores are also the front end's. The
step waits for a helper that the front end has interrupted, and the front end's work for the next step waits for a core. What that
costs depends on model, machine and load. So it is measured where it counts, from the start of a step to the start of the next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import fmean

TRIAL_STEPS = 16  # that decide; the slowest eighth of them is left out, among it pauses between requests
# After which the slower way is tried again: a trial that is half as slow again costs 16 / 528 / 2 = 1.5 % of the time.
KEPT_STEPS = 512


class ThreadChoice:
    """Between `most` threads and one. `choose` begins a step; `leave` says that no step followed it at once."""

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._most, self._clock = most, clock
        self._sizes: dict[int, _Size] = {}  # by the number of binary digits of a step's tokens
        self._running: tuple[deque[float], float] | None = None  # where the step's seconds go, when it began

    def choose(self, num_tokens: int) -> int:
        """Threads for a step of so many tokens, which begins now."""
        now = self._clock()
        if self._running is not None:
            taken, started = self._running
            taken.append(now - started)
        way = self._sizes.setdefault(num_tokens.bit_length(), _Size()).next()
        self._running = way.taken, now
        return self._most if way.is_shared else 1

    def leave(self) -> None:
        """The step that `choose` began last was another than it chose, or no step follows it at once: its time tells nothing."""
        self._running = None


class _Way:
    """One of two ways of computing a step."""

    def __init__(self, is_shared: bool) -> None:
        self.is_shared = is_shared
        self.taken: deque[float] = deque(maxlen=TRIAL_STEPS)  # seconds of its last steps

    def seconds(self) -> float:
        """Of a step, on average; some were measured."""
        return fmean(sorted(self.taken)[: len(self.taken) - len(self.taken) // 8])


class _Size:
    """Steps of one size: both ways are tried, then the faster one is kept for a while, and so on."""

    def __init__(self) -> None:
        self._way, self._other = _Way(is_shared=True), _Way(is_shared=False)  # of the next step, and the other one
        self._left = TRIAL_STEPS  # steps before the next decision
        self._is_trial = True

    def next(self) -> _Way:
        if self._left == 0:
            self._decide()
        self._left -= 1
        return self._way

    def _decide(self) -> None:
        if not self._way.taken:  # none of its steps was followed at once: they tell nothing
            self._left = TRIAL_STEPS
        elif self._is_trial and self._other.taken:
            self._is_trial, self._left = False, KEPT_STEPS
            if self._other.seconds() <= self._way.seconds():
                self._swap()
        else:
            self._is_trial, self._left = True, TRIAL_STEPS
            self._other.taken.clear()
            self._swap()

    def _swap(self) -> None:
        self._way, self._other = self._other, self._way
