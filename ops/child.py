"""A child process that is kept running: started, watched, restarted with backoff when it dies, followed by another one.

It dies with this process (ops/parent_death.py) and leads a session of its own. So a Ctrl-C in the terminal reaches the supervisor
alone, and all processes that a child has started can be killed with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ops.errors import CommandError
from ops.parent_death import bound_to_parent
from ops.silence import Silence

log = logging.getLogger(__name__)

FIRST_DELAY = 0.5  # seconds before the second restart in a row: the first comes at once, later ones double up to LONGEST_DELAY
LONGEST_DELAY = 30.0
CALM = 60.0  # seconds of running after which a death counts as the first one again
START_ATTEMPTS = 4  # of a child that was never ready: after so many failures another attempt is pointless
LONGEST_LINE = 64 * 1024
STACKS_SECONDS = 0.5  # for a silent child to write its stacks
LAST_LINES_SECONDS = 2.0  # for what a dead child has left in its pipes


class ChildFailed(CommandError):
    """A child cannot be kept running. EX_CONFIG where it said that it never will under this configuration."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def role(name: str, *arguments: str) -> list[str]:
    """The command line of a headrace role in a process of its own."""
    return [sys.executable, "-P", "-m", "ops.cli", name, *arguments]


def numbered(name: str, count: int) -> list[str]:
    """The names of children of one role: a lone one needs no number."""
    return [name] if count == 1 else [f"{name}-{number}" for number in range(count)]


@dataclass(frozen=True)
class Command:
    """The command of a child. `ready` returns once the process answers; without it the child reports that on its progress pipe."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    inherited: tuple[int, ...] = ()  # file descriptors, same numbers in the child
    stop_timeout: float = 10.0  # seconds between SIGTERM and SIGKILL
    ready: Callable[[], Awaitable[None]] | None = None
    not_before: Callable[[], Awaitable[Any]] | None = None  # returns when the first start may be
    patience: float = 0.0  # seconds without a sign of life, after its first one, before it is killed; 0: without end
    essential: bool = True  # without it there is nothing to serve: give up where it cannot start


@dataclass(frozen=True)
class Exit:
    """How a process ended: `status` is its exit status, or minus the signal that killed it."""

    pid: int
    status: int
    last_words: str  # the error it reported, else its last line
    was_silent: bool = False  # and killed for it

    def __str__(self) -> str:
        if self.was_silent:
            return "it showed no sign of life"
        if self.status < 0:
            return f"killed by {signal.Signals(-self.status).name}"
        return f"exit status {self.status}" + (f": {self.last_words}" if self.last_words else "")


class Child:
    """One supervised command. `run` keeps it running until `stop`."""

    def __init__(
        self,
        command: Command,
        *,
        on_line: Callable[[str], None],
        on_progress: Callable[[dict[str, Any]], None] | None = None,
        on_exit: Callable[[Exit], Awaitable[None]] | None = None,
        on_failure: Callable[[ChildFailed], bool] | None = None,
        others_serve: Callable[[Child], bool] = lambda child: False,
    ) -> None:
        """`on_failure` hears that a restart is pointless, and says whether `run` returns (True) or raises that. While a replica of
        the child serves (`others_serve`), no death of the child after its first start is the last."""
        self.name = command.name
        self.ready = asyncio.Event()
        self.is_on_trial = False  # where it ends before it is ready, it is not started again
        self._command = command
        self._on_line = on_line
        self._on_progress = on_progress
        self._on_exit = on_exit
        self._on_failure = on_failure
        self._others_serve = others_serve
        self._was_ready = False
        self._last_exit: Exit | None = None
        self._news = asyncio.Event()  # it is ready, or has ended
        self._process: asyncio.subprocess.Process | None = None
        self._group: int | None = None  # process group while any of it may live
        self._stopping = False
        self._silence = Silence(command.patience)
        self._was_silent = False
        self._reported_error = ""
        self._last_lines: deque[str] = deque(maxlen=1)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def run(self) -> None:
        """Returns after `stop`, or raises ChildFailed when a restart is pointless."""
        loop = asyncio.get_running_loop()
        deaths = 0
        if self._command.not_before is not None:
            await self._command.not_before()
        while not self._stopping:
            started = loop.time()
            self._last_exit = ended = await self._run_once()
            self.ready.clear()
            self._news.set()
            if self._stopping or (self.is_on_trial and not self._was_ready):
                return
            deaths = 1 if loop.time() - started > CALM else deaths + 1
            if self._on_exit is not None:
                await self._on_exit(ended)
                if self._stopping:  # meanwhile: its stop reports the end
                    return
            if ended.status == 0 and self._was_ready:
                log.info("%s ended in order; starting it again", self.name)
                deaths = 0
                continue
            if failure := self._failure(ended, deaths):
                if self._on_failure is not None and self._on_failure(failure):
                    return
                raise failure
            delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** (deaths - 2)) if deaths > 1 else 0.0
            log.warning("%s died (%s); restarting it %s", self.name, ended, f"in {delay:g} s" if delay else "at once")
            await asyncio.sleep(delay)

    def _failure(self, ended: Exit, deaths: int) -> ChildFailed | None:
        """Why another start is pointless, if it is."""
        if not self._command.essential or (self._was_ready and self._others_serve(self)):
            return None
        if ended.status == os.EX_CONFIG:
            return ChildFailed(ended.last_words or f"{self.name} cannot run with this configuration", os.EX_CONFIG)
        if not self._was_ready and deaths >= START_ATTEMPTS:
            return ChildFailed(f"{self.name} did not start in {deaths} attempts; the last one: {ended}")
        return None

    async def _run_once(self) -> Exit:
        # pipes of our own: asyncio's would keep `wait` waiting for other processes to which the child gave them
        output_read, output_write = os.pipe()
        progress_read, progress_write = os.pipe()
        self._reported_error, self._was_silent = "", False
        self._last_lines.clear()
        watchers = [
            asyncio.create_task(_each_line(output_read, self._take_line)),
            asyncio.create_task(_each_line(progress_read, self._take_progress)),
        ]
        try:
            try:
                self._process = process = await self._start(output_write, progress_write)
            finally:
                os.close(output_write)
                os.close(progress_write)
            self._group = process.pid
            if self._stopping:  # since its start was begun
                self.kill_group()
            if self._command.ready is not None:
                watchers.append(asyncio.create_task(self._await_ready(self._command.ready)))
            watchers.append(asyncio.create_task(self._end_silent(process)))
            await process.wait()
            self.kill_group()  # what the dead one had started holds its pipes and its memory
            await asyncio.wait(watchers[:2], timeout=LAST_LINES_SECONDS)
        finally:
            self.kill_group()
            self._group = None
            for watcher in watchers:
                watcher.cancel()
        assert process.returncode is not None
        last_words = self._reported_error or next(iter(self._last_lines), "")
        return Exit(process.pid, process.returncode, last_words, self._was_silent)

    async def _start(self, output: int, progress: int) -> asyncio.subprocess.Process:
        reports = self._on_progress is not None
        return await asyncio.create_subprocess_exec(
            *bound_to_parent([*self._command.arguments, *(["--progress-fd", str(progress)] if reports else [])]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=self._command.environment,
            pass_fds=(*self._command.inherited, *([progress] if reports else [])),
            start_new_session=True,
        )

    async def _await_ready(self, ready: Callable[[], Awaitable[None]]) -> None:
        await ready()
        self._is_ready()

    def _is_ready(self) -> None:
        self._was_ready = True
        self.ready.set()
        self._news.set()

    async def _end_silent(self, process: asyncio.subprocess.Process) -> None:
        await self._silence.too_long()
        log.error("%s has shown no sign of life for %g s; killing it", self.name, self._command.patience)
        self._was_silent = True
        process.send_signal(signal.SIGUSR1)  # it writes its stacks, unless it is stopped
        await asyncio.sleep(STACKS_SECONDS)
        self.kill_group()

    def _take_progress(self, line: str) -> None:
        report: dict[str, Any] = json.loads(line)
        if report["phase"] == "alive":
            self._silence.heard()
            return
        self._reported_error = report.get("message", self._reported_error)
        if report["phase"] == "ready":
            self._is_ready()
        if self._on_progress is not None:
            self._on_progress(report)

    def _take_line(self, line: str) -> None:
        if line.strip():
            self._last_lines.append(_said(line.strip()))
        self._on_line(line)

    async def stop(self) -> None:
        """Ask with SIGTERM, wait for the command's time, then kill. Safe when it never ran or has ended."""
        self._stopping = True
        self._news.set()
        await self._end_process()

    async def _end_process(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(self._command.stop_timeout):
                await process.wait()
        except TimeoutError:
            log.warning("%s did not stop in %g s; killing it", self.name, self._command.stop_timeout)
            self.kill_group()
            await process.wait()

    async def restart(self) -> None:
        """End the process in order; returns when the next one is ready. Raises ChildFailed when that one ends first."""
        before, self._last_exit = self.pid, None
        await self._end_process()
        if self._command.ready is not None or self._on_progress is not None:
            await self.comes_up(before)

    async def comes_up(self, before: int | None = None) -> None:
        """Returns when a process other than `before` is ready. Raises ChildFailed when it ends first."""
        while not (self.ready.is_set() and self.pid not in (None, before)):
            if self._stopping or (self._last_exit is not None and self._last_exit.pid != before):
                raise ChildFailed(f"{self.name} did not come up: {self._last_exit or 'it was told to stop'}")
            self._news.clear()
            await self._news.wait()

    def successor(self) -> Child:
        """Another child with the same command, to take this one's place."""
        return Child(
            self._command,
            on_line=self._on_line,
            on_progress=self._on_progress,
            on_exit=self._on_exit,
            on_failure=self._on_failure,
            others_serve=self._others_serve,
        )

    async def retire(self, number: signal.Signals, seconds: float) -> None:
        """End for good: signal `number` asks for it, and after `seconds` SIGTERM does. Its end is reported."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            process.send_signal(number)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), seconds)
            await self._end_process()
        while self._group is not None:
            self._news.clear()
            await self._news.wait()
        if self._on_exit is not None and self._last_exit is not None:
            await self._on_exit(self._last_exit)

    def kill(self) -> None:
        """End it at once and for good; its death is no news."""
        self._stopping = True
        self.kill_group()

    def kill_group(self) -> None:
        """Kill the process and all that it started, at once."""
        if self._group is not None:
            try:
                os.killpg(self._group, signal.SIGKILL)
            except ProcessLookupError:
                pass


def _said(line: str) -> str:
    """The message of a log line: that of a JSON record, else the line itself."""
    try:
        record = json.loads(line)
    except ValueError:
        return line
    return str(record.get("message", line)) if isinstance(record, dict) else line


async def _each_line(descriptor: int, take: Callable[[str], None]) -> None:
    """Hand a pipe over line by line, and close it; a line without end is cut, so that memory stays bounded."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb")
    )
    held = b""
    try:
        while chunk := await stream.read(LONGEST_LINE):
            *lines, held = (held + chunk).split(b"\n")
            if len(held) > LONGEST_LINE:
                lines, held = [*lines, held], b""
            for line in lines:
                take(line.decode(errors="replace"))
        if held:
            take(held.decode(errors="replace"))
    finally:
        transport.close()
