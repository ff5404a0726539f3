"""Sees whether an engine gets on with its work. One that does not falls silent or ends: its requests need another engine.

Four things count as standing still. Each is a sentence in the log, with the stacks of engine and workers:

- `step`: a step runs for more than ten times its forecast;
- `schedule`: there is work, and no step is planned for it: the scheduler is stuck, or the loop spins;
- `loop`: the loop stands still outside of a step;
- `rank`: a worker process is stopped, as by SIGSTOP.

Patience is counted in this thread's own looks: a process or machine that was itself suspended is not late. Nor is an engine that
waits for Redis.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.runtime.core import EngineCore

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks: each takes time from a step
LOOKS_A_TIMEOUT = 4  # at least, also where the timeout is short
LATE_FACTOR = 10.0  # of a step's forecast
FIRST_STEPS = 16  # they may compile kernels
FIRST_STEPS_SECONDS = 300.0  # that one of those may take
STOPPED_SECONDS = 3.0  # that a worker may be stopped, as by a debugger
DUMP_SECONDS = 0.5  # for the workers to write their stacks
DEFAULT_TIMEOUT = 20.0


@dataclass(frozen=True)
class Alarm:
    kind: str  # as at the head of this file
    reason: str


class Output(Protocol):
    """Where the loop puts its output."""

    @property
    def is_blocked(self) -> bool:
        """The loop waits here, for Redis."""


class Watchdog:
    """The thread that looks. `alarmed` is called on it, after the stacks were dumped, and may end the process; `tell_alive` is
    called at each look."""

    def __init__(
        self,
        core: EngineCore,
        output: Output,
        timeout: float = DEFAULT_TIMEOUT,
        alarmed: Callable[[Alarm], None] = lambda alarm: None,
        tell_alive: Callable[[], None] = lambda: None,
    ) -> None:
        """`timeout`: seconds for which a step or the loop may stand still whatever is forecast."""
        self.turns = 0  # of the loop, which counts them
        self._alarm: Alarm | None = None
        self._core = core
        self._output = output
        self._timeout = timeout
        self._alarmed = alarmed
        self._tell_alive = tell_alive
        self._seen: tuple[bool, int] | None = None  # has work, and the number that moves when the engine gets on
        self._still = 0.0  # seconds for which it has not moved
        self._stopped = 0.0  # seconds for which a worker is stopped
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()

    def gets_on(self) -> bool:
        """For the heartbeat, on its thread."""
        return self._alarm is None

    def _run(self) -> None:
        interval = min(LOOK_SECONDS, self._timeout / LOOKS_A_TIMEOUT)
        last = time.monotonic()
        while not self._end.wait(interval):
            now = time.monotonic()
            alarm = self.look(min(now - last, 2 * interval))
            last = now
            is_new = alarm is not None and self._alarm is None
            self._alarm = alarm
            if alarm is not None and is_new:
                self._dump(alarm)
                self._alarmed(alarm)
            self._tell_alive()

    def look(self, seconds: float) -> Alarm | None:
        """What is wrong by now; `seconds` have passed since the last look."""
        return self._look_at_ranks(seconds) or self._look_at_loop(seconds)

    def _look_at_ranks(self, seconds: float) -> Alarm | None:
        stopped = self._core.executor.stopped_ranks()
        self._stopped = self._stopped + seconds if stopped else 0.0
        if self._stopped < STOPPED_SECONDS:
            return None
        return Alarm("rank", f"{' and '.join(stopped)} stopped and did not go on within {STOPPED_SECONDS:g} s")

    def _look_at_loop(self, seconds: float) -> Alarm | None:
        core = self._core
        has_work = core.has_work
        seen = (has_work, core.num_returned if has_work else self.turns)
        if seen != self._seen or self._output.is_blocked:
            self._seen, self._still = seen, 0.0
            return None
        self._still += seconds
        is_computing = core.num_submitted > core.num_returned
        if self._still < (self._patience() if is_computing else self._timeout):
            return None
        if not has_work:
            return Alarm("loop", f"the engine's loop has stood still for {self._still:.0f} s outside of a step")
        if is_computing:
            forecast = f"its forecast was {core.step_forecast:.2g} s" if core.step_forecast else "it is one of the first"
            return Alarm("step", f"step {core.num_returned + 1} has run for {self._still:.0f} s; {forecast}")
        rows, waiting, pool = core.scheduler.rows, core.scheduler.waiting, core.scheduler.kv.pool
        return Alarm(
            "schedule",
            f"no step was planned for {self._still:.0f} s, though {rows.num_running} choices run, {len(waiting)} wait "
            f"and {pool.num_free} KV blocks are free",
        )

    def _patience(self) -> float:
        """Seconds that the step that is out may take."""
        least = self._timeout if self._core.num_returned >= FIRST_STEPS else max(self._timeout, FIRST_STEPS_SECONDS)
        return max(least, LATE_FACTOR * self._core.step_forecast)

    def _dump(self, alarm: Alarm) -> None:
        logger.error("the engine does not get on: %s. The stacks of its threads and workers follow", alarm.reason)
        faulthandler.dump_traceback()
        if self._core.executor.dump_stacks():
            self._end.wait(DUMP_SECONDS)
