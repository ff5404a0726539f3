"""Named calls into a running engine, for operators: the names of `Utility` commands."""

from __future__ import annotations

import cProfile
import logging
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.protocol import ControlReply, Utility
from engine.runtime.core import EngineCore
from engine.runtime.heartbeat import Heartbeat
from engine.runtime.intake import Intake

logger = logging.getLogger(__name__)


class UtilityFailed(Exception):
    """The call was understood and could not be done; the text says why."""


class UtilityCalls:
    """The calls that a `Utility` command may name, on one engine. They run on the thread of its loop."""

    def __init__(self, core: EngineCore, intake: Intake, heartbeat: Heartbeat, stop: Callable[[float], None]) -> None:
        """`stop` ends the engine after so many seconds, or when nothing runs any more."""
        self._core = core
        self._stop = stop
        self._intake = intake
        self._heartbeat = heartbeat
        self._profile: cProfile.Profile | None = None
        self._calls: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": self._reset_prefix_cache,
            "sleep": self._sleep,
            "drain": self._drain,
            "wake_up": self._wake_up,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
        }

    def run(self, command: Utility) -> ControlReply:
        """An error becomes the answer, and never ends the engine."""
        call = self._calls.get(command.name)
        if call is None:
            return ControlReply(command.token, ok=False, error=f"There is no utility call {command.name!r}.")
        try:
            return ControlReply(command.token, value=call(*command.arguments))
        except UtilityFailed as error:
            return ControlReply(command.token, ok=False, error=str(error))
        except Exception as error:
            logger.exception("the utility call %s failed", command.name)
            return ControlReply(command.token, ok=False, error=f"{type(error).__name__}: {error}")

    def _reset_prefix_cache(self) -> bool:
        """False while requests hold blocks."""
        return self._core.scheduler.reset_prefix_cache()

    def _sleep(self) -> None:
        """Take no more requests and empty the prefix cache. Requests that were taken go on; others stay in Redis."""
        self._intake.paused = True
        self._heartbeat.info.state = "sleeping"
        self._core.scheduler.reset_prefix_cache()

    def _drain(self, handover: bool = False) -> int:
        """Take no more requests and end: after those that run, or with `handover` at once, so that another engine continues them.
        Returns how many choices run or wait here."""
        self._heartbeat.info.state = "draining"
        self._stop(0.0 if handover else math.inf)
        stats = self._core.stats()
        return stats.num_running + stats.num_waiting

    def _wake_up(self) -> None:
        self._intake.paused = False
        self._heartbeat.info.state = "ready"
        self._intake.ring()

    def _start_profile(self) -> None:
        if self._profile is not None:
            raise UtilityFailed("A profile is being taken already.")
        self._profile = cProfile.Profile()
        self._profile.enable()

    def _stop_profile(self) -> str:
        """Path of the profile on the engine's machine (read it with `python -m pstats`)."""
        if self._profile is None:
            raise UtilityFailed("No profile is being taken.")
        self._profile.disable()
        path = Path(tempfile.mkdtemp(prefix="headrace-profile-")) / "engine.pstats"
        self._profile.dump_stats(path)
        self._profile = None
        return str(path)
