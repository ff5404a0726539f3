"""Named points in the code at which a process can be made to die, for `benchmarks.chaos` and tests of failover.

`HEADRACE_FAULT_POINT="after-take:3"` kills this process with SIGKILL when it reaches the point `after-take` for the third time.
Without the variable `reach` is an empty function.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Literal, get_args

ENVIRONMENT_VARIABLE = "HEADRACE_FAULT_POINT"

FaultPoint = Literal[
    "after-take",  # Redis gave the engine requests, and the engine has flushed nothing of them
    "flush-sent",  # Redis has a flush, and the engine has not read the answer
    "checkpointed",  # the output of running requests is appended, and the journal behind it is not trimmed
    "taking-over",  # some of a dead engine's requests are in `resume`, the others still pending
    "folded",  # an orphan's output is folded, and no step has computed a token of it
    "stop-ordered",  # the engine has read a stop or an abort and has not obeyed it
]
FAULT_POINTS: tuple[FaultPoint, ...] = get_args(FaultPoint)


def reach(point: FaultPoint) -> None:
    """Die here if this is the point and the passing that the variable names."""
    _reach(point)


def _armed(order: str) -> Callable[[str], None]:
    """What `reach` does under the order `NAME:PASSING`. Raises ValueError for another form or an unknown name."""
    name, _, passing = order.partition(":")
    if name not in FAULT_POINTS or not passing.isdecimal() or int(passing) < 1:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}={order} is not NAME:PASSING with one of {', '.join(FAULT_POINTS)}")
    passings = itertools.count(1)  # `next` of it is atomic: threads may pass at once

    def die_at_last(point: str) -> None:
        if point == name and next(passings) == int(passing):
            os.kill(os.getpid(), signal.SIGKILL)

    return die_at_last


def _nothing(point: str) -> None:
    pass


_order = os.environ.get(ENVIRONMENT_VARIABLE, "")
_reach: Callable[[str], None] = _armed(_order) if _order else _nothing
