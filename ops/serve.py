"""`headrace serve`: the whole server on one machine, as processes under one supervisor.

    valkey (unless --redis-url)  <-  engines (their workers)  <-  API servers on one socket
                                 <-  Celery worker with beat

The roles find their settings in the environment; nothing about them is passed through this process once they run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from engine import calls
from engine.bus import Bus
from engine.protocol import EngineInfo
from ops import listen
from ops.announce import show_configuration, show_derived, show_ready
from ops.embedded import DataDirectory, EmbeddedValkey
from ops.errors import CommandError
from ops.logs import resolve_format
from ops.prepare import check, fetch_model, name_model
from ops.progress import LoadingDisplay, Slowest
from ops.replicas import settle_replicas
from ops.settings import Resolved, role_environment, shown
from ops.supervise import Child, Command, Exit, Supervisor

log = logging.getLogger(__name__)

ENGINE_SECTIONS = ("model", "cache", "parallel", "scheduler", "redis", "log")
API_SECTIONS = ("api", "redis", "log")
WORKER_SECTIONS = ("redis", "log")
ENGINE_STOP_SECONDS = 15.0
API_STOP_SECONDS = 10.0  # beyond --shutdown-timeout
WORKER_STOP_SECONDS = 10.0
POLL_SECONDS = 0.1
METRICS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's name


def serve(resolved: Resolved) -> int:
    """Bring everything up, run until a signal, take everything down. Returns the exit status; raises CommandError."""
    config = resolved.config
    check(config)
    with ExitStack() as stack:
        listener = stack.enter_context(listen.bind(config.api))
        resolved.derive("port", listener.getsockname()[1], resolved.sources["port"] if config.api.port else "a free one")
        directory = None
        if not config.redis.redis_url:
            directory = DataDirectory(config.redis.data_dir)
            stack.callback(directory.close)
            resolved.derive("data_dir", str(directory.path), resolved.sources["data_dir"])
        display = LoadingDisplay()
        stack.callback(display.close)
        fetch_model(resolved, display.update)
        name_model(resolved)
        settle_replicas(resolved)
        if config.log.log_format == "auto":
            reason = "stderr is a terminal" if sys.stderr.isatty() else "stderr is no terminal"
            resolved.derive("log_format", resolve_format(config.log), reason)
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-"))
        return asyncio.run(_run(resolved, listener, directory, display, Path(scratch)))


async def _run(resolved: Resolved, *parts: Any) -> int:
    return await _Serve(resolved, *parts).run()


def role(name: str, *arguments: str) -> list[str]:
    """The command line of a headrace role in a process of its own."""
    return [sys.executable, "-P", "-m", "ops.cli", name, *arguments]


def numbered(name: str, count: int) -> list[str]:
    """The names of children of one role: a lone one needs no number."""
    return [name] if count == 1 else [f"{name}-{number}" for number in range(count)]


class _Serve:
    """One run of `serve`, inside the event loop."""

    def __init__(
        self,
        resolved: Resolved,
        listener: socket.socket,
        directory: DataDirectory | None,
        display: LoadingDisplay,
        scratch: Path,
    ) -> None:
        self._resolved = resolved
        self._config = resolved.config
        self._listener = listener
        self._directory = directory
        self._display = display
        self._scratch = scratch
        self._url = listen.url_of(listener)
        self._supervisor = Supervisor()
        self._serving = False

    async def run(self) -> int:
        return await self._supervisor.run(self._bring_up())

    async def _bring_up(self) -> None:
        self._display.update("start", None)
        await self._start_redis()
        show_configuration(self._resolved)
        worker, engines, servers = self._worker(), list(self._engines()), self._api_servers()
        self._supervisor.start(worker)
        self._supervisor.start(*engines)
        self._supervisor.start(*servers)
        for engine in engines:
            await engine.ready.wait()
        await self._answers("/ready")
        self._serving = True
        self._display.close()
        await self._show_derived(engines[0])
        show_ready(self._config, self._url)

    async def _start_redis(self) -> None:
        if self._directory is None:
            await _reach_redis(self._config.redis.redis_url)
            return
        valkey = EmbeddedValkey(self._directory)
        child = Child(valkey.command(), on_line=lambda line: log.debug("valkey: %s", line))
        self._supervisor.start(child)
        await child.ready.wait()
        self._resolved.derive("redis_url", valkey.url, "embedded Valkey")
        self._directory.state.redis_url = valkey.url
        self._directory.state.url = self._url
        self._directory.state.model = self._config.model.model
        self._directory.write_state()

    def _engines(self) -> Iterable[Child]:
        """Replicas on one queue: each has its own scheduler and KV."""
        environment = role_environment(self._config, ENGINE_SECTIONS, os.environ, more=("served_model_name",))
        names = numbered("engine", self._config.parallel.data_parallel_size)
        slowest = Slowest(names)
        for name in names:
            command = Command(name, role("engine"), environment, stop_timeout=ENGINE_STOP_SECONDS)
            yield self._child(command, on_progress=partial(self._engine_progress, slowest, name), on_exit=self._bury)

    def _api_servers(self) -> Iterable[Child]:
        descriptor = self._listener.fileno()
        environment = role_environment(self._config, API_SECTIONS, os.environ)
        count = self._config.api.api_server_count
        if count > 1:  # whichever of them is scraped answers for all
            environment.setdefault(METRICS_DIRECTORY, str(self._scratch / "metrics"))
            Path(environment[METRICS_DIRECTORY]).mkdir(parents=True, exist_ok=True)
        for name in numbered("api", count):
            command = Command(
                name,
                role("api", "--fd", str(descriptor)),
                environment,
                inherited=(descriptor,),
                stop_timeout=self._config.api.shutdown_timeout + API_STOP_SECONDS,
                ready=partial(self._answers, "/live"),
            )
            yield self._child(command, on_exit=partial(_forget_gauges, environment.get(METRICS_DIRECTORY)))

    def _worker(self) -> Child:
        """Celery: upkeep by beat. What it does can wait, so its death stops nothing."""
        environment = role_environment(self._config, WORKER_SECTIONS, os.environ)
        return self._child(Command("worker", role("worker"), environment, stop_timeout=WORKER_STOP_SECONDS, essential=False))

    def _child(self, command: Command, **watchers: Callable[..., Any]) -> Child:
        return Child(command, on_line=_write_line, **watchers)

    def _engine_progress(self, slowest: Slowest, name: str, report: dict[str, Any]) -> None:
        if not self._serving:
            if reached := slowest.report(name, report["phase"], report.get("fraction")):
                self._display.update(*reached)
        elif report["phase"] == "ready":
            log.info("%s is ready again", name)

    async def _show_derived(self, engine: Child) -> None:
        with Bus(self._config.redis.redis_url) as bus:
            info = await asyncio.to_thread(engine_of_process, bus, engine.pid or 0)
        if info is not None:
            show_derived(self._config, info)

    async def _bury(self, ended: Exit) -> None:
        """End what the dead engine had in flight at once: nobody needs to wait for its heartbeat to lapse."""
        try:
            buried = await asyncio.to_thread(bury_engine, self._config.redis.redis_url, ended.pid, f"the engine died: {ended}")
        except Exception as error:  # Redis away: whoever sees the heartbeat missing ends them
            log.warning("the dead engine's requests could not be ended at once: %s", error)
        else:
            if buried:
                log.warning("the dead engine had %d requests in flight; they were ended", buried)

    async def _answers(self, path: str) -> None:
        """Returns once an API server answers `path` with 200."""
        import httpx

        async with httpx.AsyncClient(base_url=self._url, timeout=2.0, trust_env=False) as client:
            while True:
                try:
                    if (await client.get(path)).is_success:
                        return
                except httpx.TransportError:
                    pass  # no API server accepts yet
                await asyncio.sleep(POLL_SECONDS)


def engine_of_process(bus: Bus, pid: int) -> EngineInfo | None:
    """What the engine that runs, or has just run, as process `pid` of this machine says of itself."""
    host = socket.gethostname()
    infos = (info for model in bus.run(calls.models()) for info in bus.run(calls.engines(model)))
    return next((info for info in infos if (info.pid, info.host) == (pid, host)), None)


def bury_engine(redis_url: str, pid: int, error: str) -> int:
    """Declare the engine that ran as process `pid` of this machine dead; returns how many requests ended."""
    with Bus(redis_url) as bus:
        info = engine_of_process(bus, pid)
        if info is None:
            return 0
        bus.run(calls.release_slot(info.model, info.slot, info.incarnation))
        return bus.run(calls.bury(info.model, info.slot, info.incarnation, error))


async def _forget_gauges(directory: str | None, ended: Exit) -> None:
    """What an API server that died had in hand counts no more; what it had counted stays."""
    if directory is not None:
        mark_process_dead(ended.pid, directory)  # type: ignore[no-untyped-call]


async def _reach_redis(url: str) -> None:
    import redis.asyncio
    import redis.exceptions

    client = redis.asyncio.Redis.from_url(url, socket_connect_timeout=5.0)
    try:
        await client.ping()
    except (redis.exceptions.RedisError, OSError) as error:
        raise CommandError(f"cannot use Redis at {shown('redis_url', url)}: {error}") from None
    finally:
        await client.aclose()


def _write_line(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
