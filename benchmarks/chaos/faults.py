"""The faults, and the seeded order in which they come."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import psutil

from benchmarks.chaos.cluster import HEADRACE, Cluster, Role
from engine.fault_points import FAULT_POINTS, FaultPoint

Inject = Callable[[Cluster, random.Random], Awaitable[str]]  # returns what it did, for the log

STOPPED_SECONDS = (0.5, 3.0, 8.0)  # an engine stands still: shorter and longer than its time to live
PAUSE_SECONDS = (0.5, 2.5, 10.0)  # Redis stands still
API_STOPPED_SECONDS = (0.5, 2.0)
# An API server that dies just when Redis forgets may take a request with it that nobody else knows: these keep their distance
FORGETFUL = frozenset({"redis-rollback", "redis-wipe", "at-checkpointed"})
API_DEATHS = frozenset({"kill-api", "drain-api", "at-taking-over"})
# Three deaths without 64 tokens between them end a request with an error, as they should: it may be why the engines die.
# Before each of these, which are one or two deaths, all requests have got over the last one.
ENGINE_DEATHS = frozenset(
    {
        "kill-engine", "kill-worker", "stop-engine",
        *(f"at-{point}" for point in FAULT_POINTS),
    }
)  # fmt: skip
APART = ((FORGETFUL, API_DEATHS, 8.0), (ENGINE_DEATHS, ENGINE_DEATHS, 15.0))  # seconds between these two kinds


@dataclass(frozen=True)
class Injected:
    """A fault that came."""

    kind: str
    detail: str
    began: float  # time.monotonic()
    ended: float


async def _kill_engine(cluster: Cluster, chance: random.Random) -> str:
    return _kill(chance.choice(cluster.engines))


async def _kill_api(cluster: Cluster, chance: random.Random) -> str:
    return _kill(chance.choice(cluster.api_servers))


async def _kill_maintenance(cluster: Cluster, chance: random.Random) -> str:
    return _kill(cluster.maintenance)


def _kill(role: Role) -> str:
    role.send(signal.SIGKILL)
    return role.name


async def _kill_worker(cluster: Cluster, chance: random.Random) -> str:
    role = chance.choice(cluster.engines)
    workers = [process for process in role.tree()[1:] if "gpu.worker_main" in " ".join(process.cmdline())]
    if not workers:
        return f"{role.name} has no worker now"
    role.touched = time.monotonic()  # its engine ends with it
    workers[0].kill()
    return f"worker of {role.name}"


async def _stop_engine(cluster: Cluster, chance: random.Random) -> str:
    return await _stand_still(chance.choice(cluster.engines), chance.choice(STOPPED_SECONDS))


async def _stop_api(cluster: Cluster, chance: random.Random) -> str:
    return await _stand_still(chance.choice(cluster.api_servers), chance.choice(API_STOPPED_SECONDS))


async def _stand_still(role: Role, seconds: float) -> str:
    processes = role.tree()
    _send(processes, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        role.touched = time.monotonic()  # an engine that another took over from ends and comes back
        _send(processes, signal.SIGCONT)
    return f"{role.name} for {seconds} s"


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        if process.is_running():
            process.send_signal(number)


async def _drain_engine(cluster: Cluster, chance: random.Random) -> str:
    role = chance.choice(cluster.engines)
    role.send(signal.SIGTERM)
    return role.name


async def _hand_over_engine(cluster: Cluster, chance: random.Random) -> str:
    """By the command; the engine's number is the one that the API servers know."""
    numbers = await cluster.engine_numbers()
    if not numbers:
        return "no engine is known now"
    number = chance.choice(numbers)
    for role in cluster.engines:
        role.touched = time.monotonic()
    arguments = ["drain", number, "--handover", "--timeout", "30", "--redis-url", cluster.redis.url]
    process = await asyncio.create_subprocess_exec(*HEADRACE, *arguments, stdout=asyncio.subprocess.DEVNULL)
    return f"engine number {number}, exit status {await process.wait()}"


async def _drain_api(cluster: Cluster, chance: random.Random) -> str:
    role = chance.choice(cluster.api_servers)
    role.send(signal.SIGTERM)
    return role.name


async def _cut_normal(cluster: Cluster, chance: random.Random) -> str:
    return f"{await cluster.redis.cut_connections('normal')} connections"


async def _cut_pubsub(cluster: Cluster, chance: random.Random) -> str:
    return f"{await cluster.redis.cut_connections('pubsub')} connections"


async def _pause_redis(cluster: Cluster, chance: random.Random) -> str:
    seconds = chance.choice(PAUSE_SECONDS)
    await cluster.redis.pause(seconds)
    return f"{seconds} s"


async def _busy_redis(cluster: Cluster, chance: random.Random) -> str:
    seconds = chance.choice(PAUSE_SECONDS)
    await cluster.redis.sleep(seconds)
    return f"{seconds} s"


async def _restart_redis(cluster: Cluster, chance: random.Random) -> str:
    await cluster.redis.restart()
    return ""


async def _roll_back_redis(cluster: Cluster, chance: random.Random) -> str:
    return f"{await cluster.redis.roll_back():.2f} s forgotten"


async def _wipe_redis(cluster: Cluster, chance: random.Random) -> str:
    await cluster.redis.wipe()
    return ""


def _at_point(point: FaultPoint) -> Inject:
    async def inject(cluster: Cluster, chance: random.Random) -> str:
        role, passing = chance.choice(cluster.engines), chance.choice((1, 2, 3))
        died = await role.dies_at(point, passing)
        return f"{role.name}, passing {passing}{'' if died else ': not reached'}"

    return inject


async def _at_taking_over(cluster: Cluster, chance: random.Random) -> str:
    """Kill an engine, and the API server that takes over from it."""
    dead = chance.choice(cluster.engines)

    async def kill() -> str:
        return _kill(dead)

    return await _first_at("taking-over", cluster.api_servers, kill)


async def _at_folded(cluster: Cluster, chance: random.Random) -> str:
    """Kill an engine, and the one that goes on with its requests."""
    dead, *others = chance.sample(cluster.engines, len(cluster.engines))

    async def kill() -> str:
        return _kill(dead)

    return await _first_at("folded", others or [dead], kill)


async def _at_checkpointed(cluster: Cluster, chance: random.Random) -> str:
    """Roll Redis back, after which engines store all outputs, and kill the first that has done so."""

    async def roll_back() -> str:
        return await _roll_back_redis(cluster, chance)

    return await _first_at("checkpointed", cluster.engines, roll_back)


async def _first_at(point: FaultPoint, roles: Sequence[Role], provoke: Callable[[], Awaitable[str]]) -> str:
    """The first of the processes that reaches the point after the provocation dies there."""
    waits = {asyncio.create_task(role.dies_at(point, 1)): role for role in roles}
    await asyncio.sleep(0.1)  # the orders are written
    provoked = await provoke()
    pending = set(waits)
    died: list[str] = []
    while pending and not died:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        died = [waits[task].name for task in done if task.result()]
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return f"{provoked}, then {', '.join(died) or 'not reached'}"


FAULTS: dict[str, Inject] = {
    "kill-engine": _kill_engine,
    "kill-worker": _kill_worker,
    "kill-api": _kill_api,
    "kill-maintenance": _kill_maintenance,
    "stop-engine": _stop_engine,
    "stop-api": _stop_api,
    "drain-engine": _drain_engine,
    "hand-over-engine": _hand_over_engine,
    "drain-api": _drain_api,
    "cut-normal": _cut_normal,
    "cut-pubsub": _cut_pubsub,
    "redis-pause": _pause_redis,
    "redis-busy": _busy_redis,
    "redis-restart": _restart_redis,
    "redis-rollback": _roll_back_redis,
    "redis-wipe": _wipe_redis,
    **{f"at-{point}": _at_point(point) for point in FAULT_POINTS},
    "at-taking-over": _at_taking_over,
    "at-folded": _at_folded,
    "at-checkpointed": _at_checkpointed,
}


class Injector:
    """Injects faults of these kinds one after the other, in an order and at times that the seed gives."""

    def __init__(self, cluster: Cluster, kinds: Sequence[str], seed: int, mean_pause: float) -> None:
        self.injected: list[Injected] = []
        self._cluster, self._kinds, self._mean_pause = cluster, kinds, mean_pause
        self._chance = random.Random(f"faults {seed}")

    async def run(self, until: float, tell: Callable[[str], None]) -> None:
        """Until time.monotonic() is `until`."""
        last: dict[str, float] = {}  # when a fault of the kind ended
        bag: list[str] = []
        while self._kinds:
            await asyncio.sleep(1.0 + self._chance.expovariate(1 / max(0.01, self._mean_pause - 1.0)))
            if time.monotonic() > until:
                return
            bag = bag or self._chance.sample(self._kinds, len(self._kinds))  # each kind once, before any comes again
            kind = bag.pop()
            await self._keep_distance(kind, last)
            if time.monotonic() > until:
                return
            began = time.monotonic()
            detail = await FAULTS[kind](self._cluster, self._chance)
            last[kind] = time.monotonic()
            self.injected.append(Injected(kind, detail, began, last[kind]))
            tell(f"{kind} {detail}")

    async def _keep_distance(self, kind: str, last: dict[str, float]) -> None:
        if kind in ENGINE_DEATHS:
            with contextlib.suppress(TimeoutError):
                await self._cluster.until_recovered()
        pairs = [pair for one, two, seconds in APART for pair in ((one, two, seconds), (two, one, seconds))]
        free_at = [last.get(other, 0.0) + seconds for here, there, seconds in pairs if kind in here for other in there]
        await asyncio.sleep(max(0.0, max(free_at, default=0.0) - time.monotonic()))
