"""The engines of `serve`: replicas on one queue, each a supervised process with its own scheduler, workers and KV."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.config import ServeConfig
from gpu.machine import available_memory, own_memory
from ops.child import Child, ChildFailed, Command, Exit, numbered, role
from ops.progress import Slowest
from ops.replicas import Replicas
from ops.settings import role_environment
from ops.supervise import Supervisor

if TYPE_CHECKING:
    from engine.protocol import EngineInfo

log = logging.getLogger(__name__)

SECTIONS = ("model", "cache", "parallel", "scheduler", "redis", "log")
STOP_SECONDS = 15.0


class Engines:
    """`show` hears the phase that the slowest one is in while they start, and how far it is; `on_line` what they print."""

    def __init__(
        self,
        config: ServeConfig,
        replicas: Replicas,
        supervisor: Supervisor,
        show: Callable[[str, float], None],
        on_line: Callable[[str], None],
    ) -> None:
        self._config = config
        self._replicas = replicas
        self._supervisor = supervisor
        self._show = show
        self._on_line = on_line
        self._children: list[Child] = []
        self._model = ""  # as Redis knows it, once an engine is ready
        self._are_up = False
        self._is_permanent = False  # a failure that fewer engines would have too
        self._failure: asyncio.Future[ChildFailed] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Start as many engines as the configuration says, in place of those that were started before."""
        environment = role_environment(self._config, SECTIONS, os.environ, more=("served_model_name", "shutdown_timeout"))
        names = numbered("engine", self._config.parallel.data_parallel_size)
        slowest = Slowest(names)
        before = self._children
        self._children = [
            Child(
                self._command(name, environment | self._replicas.environment(number)),
                on_line=self._on_line,
                on_progress=partial(self._take_progress, slowest, name),
                on_exit=partial(self._take_over, name),
                on_failure=self._may_be_fewer,
                others_serve=self._supervisor.others_serve,
            )
            for number, name in enumerate(names)
        ]
        self._supervisor.start(*self._children, instead_of=before)

    def _command(self, name: str, environment: dict[str, str]) -> Command:
        patience = self._config.scheduler.watchdog_timeout
        stop_timeout = self._config.api.shutdown_timeout + STOP_SECONDS
        return Command(name, role("engine"), environment, stop_timeout=stop_timeout, patience=patience)

    def has_room_beside(self, child: Child) -> bool:
        """Whether another engine can have the memory that this one has, while this one runs. KV that is a share of free memory
        would be smaller."""
        cache = self._config.cache
        has_fixed_size = cache.kv_cache_memory_bytes or cache.num_gpu_blocks_override or self._config.model.computes_nothing
        if self._replicas.compute_on_gpu or not has_fixed_size or child.pid is None:
            return False
        return own_memory(child.pid) < available_memory()

    async def ready(self) -> None:
        """Returns when all are ready: as many as were started, or one alone where several were only this command's choice."""
        all_ready = asyncio.ensure_future(self._all_ready())
        either: list[asyncio.Future[Any]] = [all_ready, self._failure]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not all_ready.done():
            all_ready.cancel()
            await self._fall_back(self._failure.result())
        self._are_up = True

    async def infos(self) -> list[EngineInfo]:
        """The descriptions of the engines that live."""
        from ops.engine_processes import engines_of_processes  # when the engines are ready: until then they need the cores

        pids = [child.pid for child in self._children if child.pid is not None]
        return await asyncio.to_thread(engines_of_processes, self._config.redis.redis_url, pids)

    async def _all_ready(self) -> None:
        for child in self._children:
            await child.ready.wait()

    def _may_be_fewer(self, failure: ChildFailed) -> bool:
        """Whether a failure is not the end: at the start, of more engines than were asked for."""
        if self._are_up or self._is_permanent or not self._replicas.are_chosen or len(self._children) == 1:
            return False
        if not self._failure.done():
            self._failure.set_result(failure)
        return True

    async def _fall_back(self, failure: ChildFailed) -> None:
        log.warning("%d engines cannot start (%s); starting one", len(self._children), failure)
        await asyncio.gather(*(child.stop() for child in self._children))
        self._replicas.fall_back(f"{len(self._children)} could not start: {failure}")
        self.start()
        await self._all_ready()

    def _take_progress(self, slowest: Slowest, name: str, report: dict[str, Any]) -> None:
        self._is_permanent |= report.get("permanent", False)
        self._model = report.get("model", self._model)
        if not self._are_up:
            if reached := slowest.report(name, report["phase"], report.get("fraction")):
                self._show(*reached)
        elif report["phase"] == "ready":
            log.info("%s is ready again", name)

    async def _take_over(self, name: str, ended: Exit) -> None:
        """Let another engine continue the dead one's requests, without waiting for its heartbeat to lapse."""
        from ops.engine_processes import count_silent_engine, take_over_engine_of_process

        try:
            if ended.was_silent:
                await asyncio.to_thread(count_silent_engine, self._config.redis.redis_url, self._model)
            left = await asyncio.to_thread(take_over_engine_of_process, self._config.redis.redis_url, ended.pid)
        except Exception as error:  # Redis is away: an observer of the heartbeat does it later
            log.warning("the dead engine's requests could not be taken over at once: %s", error)
        else:
            if left.orphaned:
                log.warning("%s died with %d requests in flight; they wait for the next engine", name, left.orphaned)
            if left.ended:
                log.error("%d requests ended with an error: engine after engine died of them", left.ended)
