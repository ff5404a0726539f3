"""The Redis of a run: it has an append-only file and can be paused, restarted, rolled back by its last second, and wiped."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import redis.asyncio

from ops.parent_death import bound_to_parent

START_SECONDS = 20.0
_TIMESTAMP = re.compile(rb"(?:\r\n|\A)#TS:(\d+)\r\n")


class RedisServer:
    def __init__(self, binary: str, folder: Path) -> None:
        self._binary, self._folder = binary, folder
        self._log = open(folder.parent / "redis.log", "ab")
        self._port = free_port()
        self._process: asyncio.subprocess.Process | None = None
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self.client = redis.asyncio.Redis.from_url(self.url)

    async def start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        options = {
            "port": self._port, "bind": "127.0.0.1", "dir": self._folder, "save": "", "maxmemory-policy": "noeviction",
            "appendonly": "yes", "appendfsync": "everysec", "aof-timestamp-enabled": "yes", "auto-aof-rewrite-percentage": 0,
            "enable-debug-command": "local",
        }  # fmt: skip
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        self._process = await asyncio.create_subprocess_exec(
            *bound_to_parent([self._binary, *words]), stdout=self._log, stderr=self._log
        )
        async with asyncio.timeout(START_SECONDS):
            while not await self._answers():
                await asyncio.sleep(0.02)

    async def _answers(self) -> bool:
        with contextlib.suppress(redis.exceptions.RedisError, OSError):
            return bool(await self.client.ping())
        return False

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        await self._process.wait()

    async def pause(self, seconds: float) -> None:
        """It stands still; its connections stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._process.send_signal(signal.SIGCONT)

    async def sleep(self, seconds: float) -> None:
        with contextlib.suppress(redis.exceptions.TimeoutError):
            await self.client.execute_command("DEBUG", "SLEEP", seconds)  # type: ignore[no-untyped-call]

    async def cut_connections(self, kind: str) -> int:
        """Of the type `normal` or `pubsub`; returns how many."""
        killed = await self.client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")  # type: ignore[no-untyped-call]
        return int(killed)

    async def restart(self) -> None:
        """An orderly stop, and a start from the append-only file."""
        await self.kill(signal.SIGTERM)
        await self.start()

    async def roll_back(self) -> float:
        """Kill it, forget what it wrote within the last second, and start it. Returns the seconds that it forgot."""
        now = time.time()
        await asyncio.sleep((1.95 - now % 1.0) % 1.0)  # marks stand at whole seconds: wait until the last one is 0.95 s old
        killed = time.time()
        await self.kill()
        (file,) = (self._folder / "appendonlydir").glob("*.incr.aof")
        mark = cut_from(file, int(killed))
        await self.start()
        return killed - mark if mark else 0.0

    async def wipe(self) -> None:
        await self.kill()
        shutil.rmtree(self._folder / "appendonlydir")
        await self.start()

    async def stop(self) -> None:
        await self.client.aclose()
        if self._process is not None and self._process.returncode is None:
            await self.kill(signal.SIGTERM)
        self._log.close()


def cut_from(file: Path, second: int) -> int:
    """Cut an append-only file with timestamps at its first mark of `second` or later. Returns that mark, 0 where there is none."""
    content = file.read_bytes()
    for found in _TIMESTAMP.finditer(content):
        if int(found[1]) >= second:
            with open(file, "r+b") as writable:
                writable.truncate(found.start() + (2 if content[found.start()] == 13 else 0))
            return int(found[1])
    return 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
