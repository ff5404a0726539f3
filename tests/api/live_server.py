"""A whole headrace for tests: Redis, an engine and an API server, each a process of its own, as operators start them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.redis_sentinel import SentinelSetup
from tests.redis_server import RedisServer
from tests.waiting import wait_for

START_SECONDS = 90.0
MODEL = "tiny"


class LiveServer:
    """`engine` and `api`: command-line options of the two roles; `null`: settings of the null runner; `redis`: another than one
    without persistence, which this stops too. Up when it is constructed."""

    def __init__(
        self,
        model: Path,
        engine: tuple[str, ...] = (),
        api: tuple[str, ...] = (),
        name: str = MODEL,
        null: str = "",
        redis: RedisServer | SentinelSetup | None = None,
    ) -> None:
        self.name = name
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "HEADRACE_LOG_LEVEL": "warning", "HEADRACE_NULL_RUNNER": null}
        self.redis: Any = redis or RedisServer()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._model, self._engine_options, self._api_options = str(model), engine, api
        self.engine = self.start_engine()
        self.api, self.url = self.start_api()
        self.http = httpx.Client(base_url=self.url, timeout=60)  # a client of one's own each time costs 30 ms
        try:
            self.wait_until_healthy()
        except BaseException:
            self.stop()
            raise

    def _start(self, *arguments: str, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ops.cli", *arguments]
        process = subprocess.Popen(command, env=self._environment, pass_fds=pass_fds, cwd=Path(__file__).parents[2])
        self._processes.append(process)
        return process

    def start_engine(self) -> subprocess.Popen[bytes]:
        place = ("--redis-url", self.redis.url, "--served-model-name", self.name)
        return self._start("engine", self._model, *place, "--distributed-executor-backend", "uni", *self._engine_options)

    def start_api(self, *more: str) -> tuple[subprocess.Popen[bytes], str]:
        """An API server on a free port, and its URL."""
        with listen() as listener:
            return self.start_api_on(listener, *more), f"http://127.0.0.1:{listener.getsockname()[1]}"

    def start_api_on(self, listener: socket.socket, *more: str) -> subprocess.Popen[bytes]:
        options = ("--redis-url", self.redis.url, *self._api_options, *more)
        return self._start("api", *options, "--fd", str(listener.fileno()), pass_fds=(listener.fileno(),))

    def restart_engine(self) -> None:
        """Another engine process in place of the one that ended, or is ended here."""
        self.engine.kill()
        self.ended(self.engine)
        self.engine = self.start_engine()

    def ended(self, process: subprocess.Popen[bytes], seconds: float = 15.0) -> int:
        """The exit code of a process that ends by itself now."""
        code = process.wait(seconds)
        self._processes.remove(process)
        return code

    def wait_until_healthy(self, url: str | None = None) -> None:
        def healthy() -> bool:
            for process in self._processes:
                assert process.poll() is None, f"{process.args} ended with {process.returncode}"
            try:
                return self.http.get(f"{url or self.url}/health", timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        wait_for(healthy, "a healthy server", START_SECONDS, pause=0.05)

    def stop(self) -> None:
        self.http.close()
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        self.redis.stop()

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()


def listen() -> socket.socket:
    """A listening socket on a free port, for API servers to inherit."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.set_inheritable(True)
    return listener


def sse_events(lines: list[str]) -> list[Any]:
    """The events of a stream: JSON objects, and "[DONE]" as it is. Comments are left out."""
    payloads = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]
