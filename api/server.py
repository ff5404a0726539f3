"""The API server process: a listening socket, an event loop, and an orderly end.

SIGUSR2 has the process leave. It accepts no more connections, answers what comes on those that it has, and ends when none is left.
New connections go to the other processes that share the listening socket. SIGTERM and SIGINT do the same for --shutdown-timeout
seconds. Then requests are refused and open ones aborted, and their clients still get their last event. A second one of these
signals ends the process at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
import uvloop
from fastapi import FastAPI

from api.app import create_app
from api.app_state import Service
from api.errors import ConfigurationError
from api.http.protocol import Connection
from engine.bus.call import UnfitRedis
from engine.config import ApiConfig, RedisConfig

logger = logging.getLogger("headrace.api")

BACKLOG = 2048
LOOK_SECONDS = 0.05
LATE_REQUEST_SECONDS = 0.5  # that a request may be under way to a connection which its client thinks is kept
LAST_WORDS_SECONDS = 5  # for aborted streams to send their end
COLLECT_AFTER = 50_000  # objects more than were freed; Python's own number is 700
SWITCH_SECONDS = 0.001  # after which a thread that works lets the event loop have the interpreter; Python's own number is 0.005
WANTED_FILES = 65535  # open connections are open files


def run_api(config: ApiConfig, redis_config: RedisConfig, listener: socket.socket, tell_up: Callable[[], None]) -> int:
    """Serve until told to stop; returns the process's exit code: 0 after a signal, 1 when a part of the server died.

    `listener` listens already; several API processes may share it. `tell_up` is called once connections are answered.
    78 (EX_CONFIG) tells a supervisor that it will fail again the same way.
    """
    try:
        if min(config.request_timeout, config.keep_alive_timeout) <= 0:
            raise ConfigurationError("--request-timeout and --keep-alive-timeout must be more than 0 seconds")
        if config.slow_client_timeout < 0 or config.max_pending_bytes <= 0:
            raise ConfigurationError("--slow-client-timeout must not be negative, and --max-pending-bytes must be more than 0")
        app = create_app(config, redis_config)
    except ConfigurationError as error:
        logger.error("%s", error)
        return os.EX_CONFIG
    _raise_file_limit()
    _spare_the_collector()
    sys.setswitchinterval(SWITCH_SECONDS)
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(app, listener, tell_up))


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _spare_the_collector() -> None:
    """Objects of the start stay, so that no collection need walk them again. Streams leave no cycles, so that a step of hundreds of
    streams must not start a collection."""
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 20)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which would cut streams before they were told."""

    def __init__(self, config: uvicorn.Config, tell_up: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell_up = tell_up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._tell_up()

    def leave(self) -> None:
        """Accept no more connections; the answers on those that are open say that they are the last."""
        for each in self.servers:
            each.close()
        for connection in self.connections():
            connection.leave()

    def connections(self) -> list[Connection]:
        return [each for each in self.server_state.connections if isinstance(each, Connection)]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Ending:
    """Why the process ends: signals, or a failure inside."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.limited = asyncio.Event()  # to --shutdown-timeout
        self.forced = asyncio.Event()
        self.failure: BaseException | None = None

    def leave(self) -> None:
        self.asked.set()

    def stop(self) -> None:
        if self.limited.is_set():
            self.forced.set()
        self.limited.set()
        self.asked.set()

    def fail(self, error: BaseException) -> None:
        if self.failure is None:
            if isinstance(error, UnfitRedis):
                logger.error("%s", error)
            else:
                logger.error("a part of the API server died, the process ends", exc_info=error)
            self.failure = error
        self.limited.set()
        self.asked.set()

    @property
    def exit_code(self) -> int:
        if isinstance(self.failure, UnfitRedis):
            return os.EX_CONFIG
        return 0 if self.failure is None else 1


async def _serve(app: FastAPI, listener: socket.socket, tell_up: Callable[[], None]) -> int:
    ending = _Ending()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.stop)
    loop.add_signal_handler(signal.SIGUSR2, ending.leave)
    service: Service = app.state.service
    service.on_failure = ending.fail
    server = _Server(
        uvicorn.Config(
            app,
            http=partial(  # type: ignore[arg-type]  # uvicorn calls it
                Connection,
                request_timeout=service.config.request_timeout,
                stall_timeout=service.config.slow_client_timeout,
                dropped=service.metrics.client_dropped,
                is_leaving=lambda: service.draining,
            ),
            ssl_keyfile=service.config.ssl_keyfile or None,
            ssl_certfile=service.config.ssl_certfile or None,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # no code reads the client's address
            timeout_keep_alive=service.config.keep_alive_timeout,
            timeout_graceful_shutdown=LAST_WORDS_SECONDS,
            backlog=BACKLOG,
        ),
        tell_up,
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    asked = asyncio.create_task(ending.asked.wait())
    await asyncio.wait({serving, asked}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        asked.cancel()
        serving.result()
        return 1  # it could not start up, or stopped unasked
    await _stop(server, service, ending)
    await serving
    return ending.exit_code


async def _stop(server: _Server, service: Service, ending: _Ending) -> None:
    """Answer what is there, within the time that there is; let uvicorn close the rest."""
    service.leave()
    server.leave()
    finished = asyncio.create_task(_finish(server, service.config.keep_alive_timeout + LATE_REQUEST_SECONDS))
    limited = asyncio.create_task(ending.limited.wait())
    forced = asyncio.create_task(ending.forced.wait())
    done, _ = await asyncio.wait({finished, limited}, return_when=asyncio.FIRST_COMPLETED)
    if finished not in done:
        timeout = service.config.shutdown_timeout
        await asyncio.wait({finished, forced}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    service.abort_open()
    server.should_exit = True
    server.force_exit = ending.forced.is_set()
    for task in (finished, limited, forced):
        task.cancel()
    await asyncio.gather(finished, limited, forced, return_exceptions=True)


async def _finish(server: _Server, patience: float) -> None:
    """Returns when no connection is left, or when for `patience` seconds none had a request. Until then a client may be sending one
    on a connection that it keeps. Each answer says that it is the connection's last."""
    loop = asyncio.get_running_loop()
    calm_since = loop.time()
    while connections := server.connections():
        if any(connection.is_busy for connection in connections):
            calm_since = loop.time()
        elif loop.time() - calm_since > patience:
            return
        await asyncio.sleep(LOOK_SECONDS)
