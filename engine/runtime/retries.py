"""Work that must reach Redis, though it is away for a while."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from engine.bus.call import BusUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_SECONDS, LONGEST_SECONDS = 0.02, 1.0  # between two attempts; Redis gives no sign of its return


def insist(work: Callable[[], T], stopped: threading.Event, what: str) -> T:
    """`work`, again and again while Redis is away; the log says that `what` waits. Raises BusUnavailable once `stopped` is set."""
    seconds = FIRST_SECONDS
    while True:
        try:
            return work()
        except BusUnavailable as error:
            logger.warning("%s waits for Redis: %s", what, error)
            if stopped.wait(seconds):
                raise
            seconds = min(2 * seconds, LONGEST_SECONDS)
