"""The display while a server starts: a bar on a terminal, elsewhere a log line for each phase."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

log = logging.getLogger(__name__)

PHASES = {
    "start": "starting",
    "fetch": "fetching the model",
    "load": "loading weights",
    "profile": "profiling the device",
    "allocate": "allocating the KV cache",
}
LOGGED_STEP = 0.25  # share of a phase between two log lines


class Slowest:
    """The progress of the slowest of several children that load at the same time."""

    def __init__(self, names: Iterable[str]) -> None:
        self._reached: dict[str, tuple[int, float]] = dict.fromkeys(names, (0, 0.0))
        self._order = list(PHASES)

    def report(self, name: str, phase: str, fraction: float | None) -> tuple[str, float] | None:
        """Takes in what the child says; (phase, fraction) of the slowest one, None once all have said "ready"."""
        if phase == "ready":
            self._reached[name] = (len(self._order), 1.0)
        elif phase in PHASES:
            self._reached[name] = (self._order.index(phase), fraction or 0.0)
        place, reached = min(self._reached.values())
        return (self._order[place], reached) if place < len(self._order) else None


class LoadingDisplay:
    """Shows the phases of a start. Output that others write to sys.stderr meanwhile stands above the bar."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._phase = ""
        self._logged = 0.0

    def update(self, phase: str, fraction: float | None) -> None:
        """`fraction` of the phase is done, 0 to 1; None: it cannot be told."""
        title = PHASES.get(phase, phase)
        if sys.stderr.isatty() or self._bar is not None:
            self._draw(title, fraction)
        elif phase != self._phase or (fraction or 0.0) >= self._logged + LOGGED_STEP:
            self._logged = fraction or 0.0
            log.info("%s%s", title, f": {fraction:.0%}" if fraction else "")
        self._phase = phase

    def _draw(self, title: str, fraction: float | None) -> None:
        if self._bar is None or self._task is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description:<24}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(title, total=1.0)
            self._bar.start()
        self._bar.update(self._task, description=title, completed=fraction or 0.0, total=None if fraction is None else 1.0)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None
        self._phase, self._logged = "", 0.0
