"""`headrace serve`: the whole server on one machine, as processes under one supervisor.

    valkey (unless --redis-url)  <-  engines (their workers)  <-  API servers on one socket
                                 <-  maintenance (Celery with beat)

The roles read their settings from the environment. Once they run, they talk to each other through Redis only.
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

from ops import control_socket, listen
from ops.announce import show_configuration, show_derived, show_ready
from ops.child import Child, Command, Exit, numbered, role
from ops.embedded import DataDirectory, EmbeddedValkey
from ops.engines import Engines
from ops.errors import CommandError
from ops.logs import resolve_format
from ops.prepare import check, fetch_model, name_model, tell_of_no_effect
from ops.probe import status_of
from ops.progress import LoadingDisplay
from ops.redis_url import parse_redis_url
from ops.replicas import Replicas
from ops.rolling import Rolling
from ops.settings import Resolved, role_environment
from ops.supervise import Supervisor

log = logging.getLogger(__name__)

API_SECTIONS = ("api", "redis", "log")
MAINTENANCE_SECTIONS = ("redis", "log")
API_STOP_SECONDS = 10.0  # beyond --shutdown-timeout
MAINTENANCE_STOP_SECONDS = 10.0
POLL_SECONDS = 0.1
METRICS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's name


def serve(resolved: Resolved) -> int:
    """Bring everything up, run until a signal, take everything down. Returns the exit status; raises CommandError."""
    config = resolved.config
    check(config)
    if config.redis.redis_url:
        resolved.derive("redis_url", str(parse_redis_url(config.redis.redis_url)), resolved.sources["redis_url"])
    with ExitStack() as stack:
        listener = stack.enter_context(listen.bind(config.api))
        if not config.api.uds:
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
        if config.log.log_format == "auto":
            reason = "stderr is a terminal" if sys.stderr.isatty() else "stderr is no terminal"
            resolved.derive("log_format", resolve_format(config.log), reason)
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-"))
        return asyncio.run(_run(resolved, listener, directory, display, Path(scratch)))


async def _run(resolved: Resolved, *parts: Any) -> int:
    return await _Serve(resolved, *parts).run()


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
        self._url = listen.url_of(listener, resolved.config.api)
        self._supervisor = Supervisor(on_stop=listener.close)  # or clients would connect that no API server accepts any more
        self._is_up = asyncio.Event()
        self._rolling: Rolling | None = None

    async def run(self) -> int:
        control = await control_socket.listen(self._obey)
        try:
            return await self._supervisor.run(self._bring_up())
        finally:
            control.close()

    async def _bring_up(self) -> None:
        self._display.update("start", None)
        await self._start_redis()
        show_configuration(self._resolved)
        tell_of_no_effect(self._resolved)
        self._supervisor.start(self._maintenance())  # which waits, and is stopped last
        replicas = await asyncio.to_thread(Replicas, self._resolved)
        engines = Engines(self._config, replicas, self._supervisor, self._display.update, _write_line)
        self._rolling = Rolling(self._supervisor, engines.has_room_beside)
        engines.start()
        self._supervisor.start(*self._api_servers())
        await engines.ready()
        await self._answers("/ready")
        self._display.close()
        show_derived(self._config, await engines.infos(), replicas.reasons)
        show_ready(self._config, self._url)
        self._is_up.set()

    async def _obey(self, command: dict[str, Any], say: Callable[[str], None]) -> None:
        """A command that came by the control socket."""
        if self._rolling is None or not self._is_up.is_set():
            raise CommandError("this `serve` is still starting")
        await self._rolling.roll(command["restart"], command["timeout"], say)

    async def _start_redis(self) -> None:
        if self._directory is None:
            await asyncio.to_thread(_reach_redis, self._config.redis.redis_url)
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
            )
            on_exit = partial(_forget_gauges, environment.get(METRICS_DIRECTORY))
            yield self._child(command, on_progress=lambda report: None, on_exit=on_exit)

    def _maintenance(self) -> Child:
        """None of its work is urgent: it begins when all else is up, and its death stops nothing."""
        environment = role_environment(self._config, MAINTENANCE_SECTIONS, os.environ)
        command = Command(
            "maintenance",
            role("maintenance", "--of-serve"),
            environment,
            stop_timeout=MAINTENANCE_STOP_SECONDS,
            not_before=self._is_up.wait,
            essential=False,
        )
        return self._child(command)

    def _child(self, command: Command, **watchers: Callable[..., Any]) -> Child:
        return Child(command, on_line=_write_line, **watchers)

    async def _answers(self, path: str) -> None:
        """Returns once an API server answers `path` with 200."""
        while await status_of(self._url, path, self._config.api.uds) != 200:
            await asyncio.sleep(POLL_SECONDS)


async def _forget_gauges(directory: str | None, ended: Exit) -> None:
    """Open requests of an API server that died count no more. Its counters stay."""
    if directory is not None:
        from prometheus_client.multiprocess import mark_process_dead

        mark_process_dead(ended.pid, directory)  # type: ignore[no-untyped-call]


def _reach_redis(url: str) -> None:
    """Raises CommandError where it does not answer, SettingError where it is too old."""
    from ops.requests import connect

    with connect(url):
        pass


def _write_line(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
