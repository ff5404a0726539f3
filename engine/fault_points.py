"""Named points in the code at which a process can be made to die, for `benchmarks.chaos` and tests of failover.

`HEADRACE_FAULT_POINT` names a file. Once the file has the order `after-take:3`, the process removes it and kills itself when it
reaches the point `after-take` for the third time from then on. Without the variable `reach` is an empty function.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

ENVIRONMENT_VARIABLE = "HEADRACE_FAULT_POINT"

FaultPoint = Literal[
    "after-take",  # Redis gave the engine requests, and the engine has flushed nothing of them
    "flush-sent",  # Redis has a flush, and the engine has not read the answer
    "checkpointed",  # Redis has moved output of running requests out of the journal, and the engine has done nothing since
    "taking-over",  # an observer has made orphans of a batch of a dead engine's requests
    "folded",  # an orphan's output is folded, and no step has computed a token of it
    "stop-ordered",  # the engine has read a stop or an abort and has not obeyed it
]
FAULT_POINTS: tuple[FaultPoint, ...] = get_args(FaultPoint)


class _Orders:
    """Obeys the orders in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._order = ""
        self._num_passings = 0  # since the order was first seen
        self._lock = threading.Lock()

    def reach(self, point: str) -> None:
        with self._lock:
            try:
                order = self._path.read_text()
            except FileNotFoundError:
                order = ""
            if order != self._order:
                self._order, self._num_passings = order, 0
            name, _, passing = order.partition(":")
            if name != point:
                return
            self._num_passings += 1
            if self._num_passings >= int(passing):
                self._path.unlink()
                os.kill(os.getpid(), signal.SIGKILL)


def _nothing(point: str) -> None:
    pass


_file = os.environ.get(ENVIRONMENT_VARIABLE, "")
_reach: Callable[[str], None] = _Orders(Path(_file)).reach if _file else _nothing


def reach(point: FaultPoint) -> None:
    """Die here if the point and the passing are the ordered ones."""
    _reach(point)
