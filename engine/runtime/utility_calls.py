"""Named calls into a running engine, for operators: the names of `Utility` commands."""

from __future__ import annotations

import cProfile
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.protocol import ControlReply, Utility

if TYPE_CHECKING:
    from engine.runtime.loop import EngineLoop

logger = logging.getLogger(__name__)


class UtilityFailed(Exception):
    """The call was understood and could not be done; the text says why."""


def run_utility(loop: EngineLoop, command: Utility) -> ControlReply:
    """Run it on the loop's thread; an error becomes the answer, and never ends the engine."""
    call = UTILITIES.get(command.name)
    if call is None:
        return ControlReply(command.token, ok=False, error=f"There is no utility call {command.name!r}.")
    try:
        return ControlReply(command.token, value=call(loop, *command.arguments))
    except UtilityFailed as error:
        return ControlReply(command.token, ok=False, error=str(error))
    except Exception as error:
        logger.exception("the utility call %s failed", command.name)
        return ControlReply(command.token, ok=False, error=f"{type(error).__name__}: {error}")


def _reset_prefix_cache(loop: EngineLoop) -> bool:
    """False while requests hold blocks."""
    return loop.core.scheduler.reset_prefix_cache()


def _sleep(loop: EngineLoop) -> None:
    """Take no more requests (they wait in Redis, or go to other engines) and let go of the prefix cache; what runs goes on."""
    loop.intake.paused = True
    loop.heartbeat.info.state = "sleeping"
    loop.core.scheduler.reset_prefix_cache()


def _drain(loop: EngineLoop) -> None:
    """Take no more requests; what runs goes on."""
    loop.intake.paused = True
    loop.heartbeat.info.state = "draining"


def _wake_up(loop: EngineLoop) -> None:
    loop.intake.paused = False
    loop.heartbeat.info.state = "ready"
    loop.intake.ring()


def _start_profile(loop: EngineLoop) -> None:
    if loop.profile is not None:
        raise UtilityFailed("A profile is being taken already.")
    loop.profile = cProfile.Profile()
    loop.profile.enable()


def _stop_profile(loop: EngineLoop) -> str:
    """Path of the profile on the engine's machine (read it with `python -m pstats`)."""
    if loop.profile is None:
        raise UtilityFailed("No profile is being taken.")
    loop.profile.disable()
    path = Path(tempfile.mkdtemp(prefix="headrace-profile-")) / "engine.pstats"
    loop.profile.dump_stats(path)
    loop.profile = None
    return str(path)


UTILITIES: dict[str, Callable[..., Any]] = {
    "reset_prefix_cache": _reset_prefix_cache,
    "sleep": _sleep,
    "drain": _drain,
    "wake_up": _wake_up,
    "start_profile": _start_profile,
    "stop_profile": _stop_profile,
}
