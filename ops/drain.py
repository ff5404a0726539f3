"""Has an engine end in order, and waits until it has."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.bus import control, leases
from engine.bus.connection import Bus
from engine.protocol import EngineInfo, Utility
from ops import requests
from ops.errors import CommandError

LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Drained:
    model: str
    engine: str  # its slot
    pid: int
    state: str  # "ended", or "draining" where the time was not enough


def drain(bus: Bus, slot: str, model: str | None, handover: bool, timeout: float | None) -> Drained:
    """The engine takes no more requests, finishes those that it has, or leaves them to other engines (`handover`), and ends.
    Waits for `timeout` seconds at most; None: as long as it takes. Raises CommandError where there is no such engine."""
    info = _find(bus, slot, model)
    command = Utility("drain", [handover])
    bus.run(control.control(info.model, info.slot, info.incarnation, command))
    deadline = None if timeout is None else time.monotonic() + timeout
    while _lives(bus, info):
        if deadline is not None and time.monotonic() >= deadline:
            return Drained(info.model, info.slot, info.pid, "draining")
        time.sleep(LOOK_SECONDS)
    return Drained(info.model, info.slot, info.pid, "ended")


def _find(bus: Bus, slot: str, model: str | None) -> EngineInfo:
    living = requests.engines(bus, model)
    found = [info for info in living if info.slot == slot]
    if not found:
        raise CommandError(f"there is no engine `{slot}`; there are {', '.join(_named(living)) or 'none'}")
    if len(found) > 1:
        raise CommandError(f"several models have an engine `{slot}`: name one with --model: {', '.join(_named(found))}")
    return found[0]


def _named(infos: list[EngineInfo]) -> list[str]:
    return [f"{info.slot} of {info.model}" for info in infos]


def _lives(bus: Bus, info: EngineInfo) -> bool:
    return any(each.incarnation == info.incarnation for each in bus.run(leases.engines(info.model)))
