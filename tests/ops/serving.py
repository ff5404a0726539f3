"""Starts a real `headrace serve` for tests and knows every process that belongs to it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.waiting import wait_for

READY = re.compile(r"headrace serves (?P<model>\S+) on (?P<url>https?://\S+|/\S+); try: (?P<curl>curl .*)")
START_SECONDS = 180.0  # on a busy machine, where no kernel has been compiled yet
HEADRACE = [sys.executable, "-P", "-m", "ops.cli"]


class Serving:
    """One running `serve`. Its stderr is collected; `wait_for` waits for a line of it."""

    def __init__(self, arguments: Sequence[str], data_dir: Path, **variables: str) -> None:
        self.data_dir = data_dir
        self.environment = {**os.environ, "HEADRACE_DATA_DIR": str(data_dir), "OMP_NUM_THREADS": "1", **variables}
        self.process = subprocess.Popen(
            [*HEADRACE, "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._stderr: queue.Queue[str | None] = queue.Queue()
        self._stdout: queue.Queue[str | None] = queue.Queue()
        self._readers = [
            threading.Thread(target=_pump, args=(self.process.stderr, self._stderr, self.lines), daemon=True),
            threading.Thread(target=_pump, args=(self.process.stdout, self._stdout, []), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self.url = ""
        self.curl = ""
        self.model = ""

    def wait_ready(self, timeout: float = START_SECONDS) -> None:
        line = self._next(self._stdout, "the ready line", timeout)
        announced = READY.fullmatch(line or "")
        assert announced, f"no ready line but {line!r}:\n{self.log}"
        self.url, self.model, self.curl = announced["url"], announced["model"], announced["curl"]

    def wait_for(self, text: str, timeout: float = 20.0) -> str:
        """The next line of stderr that holds `text`."""
        deadline = time.monotonic() + timeout
        while True:
            line = self._next(self._stderr, repr(text), deadline - time.monotonic())
            assert line is not None, f"ended without {text!r}:\n{self.log}"
            if text in line:
                return line

    def _next(self, lines: queue.Queue[str | None], what: str, seconds: float) -> str | None:
        try:
            return lines.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            raise AssertionError(f"not within its time: {what}\n{self.log}") from None

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def wait(self, timeout: float = 30.0) -> int:
        status = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
        return status

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def family(self) -> list[psutil.Process]:
        """Every process that it started, directly or not."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def children(self, role: str) -> list[psutil.Process]:
        """The direct children that run as api, engine, maintenance or valkey."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                command = child.cmdline()
                if command and (role in command or Path(command[0]).name.startswith(role)):  # none: it is just being started
                    found.append(child)
        return found

    def child(self, role: str, timeout: float = 20.0) -> psutil.Process:
        """The one child of the role, which may just be starting."""
        (only,) = wait_for(lambda: self.children(role), lambda: f"the {role} runs:\n{self.log}", timeout)
        return only

    def headrace(self, *arguments: str) -> Any:
        """The JSON that a command prints."""
        command = [*HEADRACE, *arguments, "--json"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def complete(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={"prompt": "Hello", "max_tokens": 4, **body}, timeout=30)


@contextlib.contextmanager
def serving(*arguments: str, data_dir: Path, ready: bool = True, **variables: str) -> Iterator[Serving]:
    """The port is 0 unless the arguments have another. At the end no process is left, even after the test killed some."""
    if "--port" not in arguments:
        arguments = (*arguments, "--port", "0")
    server = Serving(arguments, data_dir, **variables)
    try:
        if ready:
            server.wait_ready()
        yield server
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*server.family(), psutil.Process(server.process.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        server.wait()
        for pipe in (server.process.stdout, server.process.stderr):
            assert pipe is not None
            pipe.close()


def shared_memory(processes: Sequence[psutil.Process]) -> set[str]:
    """Files under /dev/shm that these processes have mapped."""
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found |= {mapped.path for mapped in process.memory_maps() if mapped.path.startswith("/dev/shm/")}
    return found


def left(processes: Sequence[psutil.Process], timeout: float = 10.0) -> list[psutil.Process]:
    """Those that still run after `timeout` seconds at most. One that has ended and waits to be reaped by init does not run."""
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def _pump(pipe: Any, lines: queue.Queue[str | None], kept: list[str]) -> None:
    for line in pipe:
        kept.append(line.rstrip("\n"))
        lines.put(line.rstrip("\n"))
    lines.put(None)
