"""Redis' clock, by which all times are told that processes of several machines share. Scripts read it themselves."""

from __future__ import annotations

import time
from collections import deque

from engine.bus.call import Call, seconds_of
from engine.bus.connection import Bus

SAMPLES = 20  # remembered; the closest of them counts, so that one slow answer does not move the clock
FIRST_SAMPLES = 3


def redis_time() -> Call[float]:
    """Epoch seconds."""
    return Call(lambda answers: seconds_of(answers[0]), commands=(("TIME",),))


class BusClock:
    """Epoch seconds by Redis' clock, read without asking it: this machine's monotonic clock, and the difference between the two as
    answers tell it (Cristian's algorithm: the answer was made between asking and hearing). May be read on any thread.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)  # half of the round trip, difference
        self._difference = time.time() - time.monotonic()  # until Redis has told better

    def __call__(self) -> float:
        return time.monotonic() + self._difference

    def heard(self, told: float, asked_at: float, heard_at: float) -> None:
        """Redis' clock was `told` (epoch seconds) between two readings of this machine's monotonic one."""
        self._samples.append(((heard_at - asked_at) / 2, told - (asked_at + heard_at) / 2))
        self._difference = min(self._samples)[1]

    def ask(self, bus: Bus) -> None:
        """Set it for the first time. Raises BusUnavailable."""
        for _ in range(FIRST_SAMPLES):
            asked_at = time.monotonic()
            self.heard(bus.run(redis_time()), asked_at, time.monotonic())
