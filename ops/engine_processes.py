"""What Redis knows of engines that are processes of this machine."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from engine.bus import failover, leases
from engine.bus.alarms import SILENT, count_alarm
from engine.bus.connection import Bus
from engine.bus.failover import TakenOver
from engine.protocol import EngineInfo


def engines_of_processes(redis_url: str, pids: Sequence[int]) -> list[EngineInfo]:
    """The descriptions of the engines that run, or have just run, as these processes of this machine, in their order."""
    with Bus(redis_url) as bus:
        return _find(bus, pids)


def _find(bus: Bus, pids: Sequence[int]) -> list[EngineInfo]:
    host = socket.gethostname()
    infos = [info for model in bus.run(leases.models()) for info in bus.run(leases.engines(model))]
    by_pid = {info.pid: info for info in infos if info.host == host}
    return [by_pid[pid] for pid in pids if pid in by_pid]


def take_over_engine_of_process(redis_url: str, pid: int) -> TakenOver:
    """Let the requests of the engine that ran as process `pid` of this machine, and has ended, wait for the next engine."""
    with Bus(redis_url) as bus:
        found = _find(bus, [pid])
        if not found:
            return TakenOver(0, 0)
        (info,) = found
        return bus.run(failover.takeover(info.model, info.slot, info.incarnation, sure=True))


def count_silent_engine(redis_url: str, model: str) -> None:
    """An engine of the model was ended because it said nothing any more."""
    with Bus(redis_url) as bus:
        bus.run(count_alarm(model, SILENT))
