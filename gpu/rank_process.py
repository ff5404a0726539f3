"""A worker process as its executor sees it: how it is started, its channels, and what its end means. Torch-free."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NamedTuple

from gpu.worker import Logged

KILL_SECONDS = 1.0  # that a process may take to vanish after SIGTERM, and after SIGKILL
CERTAIN = 0.0  # a time before all others


class Trouble(NamedTuple):
    """Why a rank cannot go on. The least of several is the cause: the other ranks failed because they missed that one."""

    when: float  # CLOCK_MONOTONIC, or CERTAIN
    text: str
    permanent: bool = False  # a new start would end the same way


class RankProcess:
    """One worker process, its channels and its end."""

    def __init__(self, index: int, num_ranks: int, rendezvous: int | None) -> None:
        self.index = index
        self.trouble: Trouble | None = None
        own_socket, worker_socket = socket.socketpair()
        self.commands = Connection(own_socket.detach())
        self.reports, worker_reports = Pipe(duplex=False)
        with worker_socket, worker_reports:
            descriptors = [worker_socket.fileno(), worker_reports.fileno()]
            arguments = [f"--rank={index}", f"--of={num_ranks}", f"--parent={os.getpid()}"]
            arguments += [f"--commands={descriptors[0]}", f"--reports={descriptors[1]}"]
            # A fresh interpreter: the caller's main module, whatever it is, does not run again in it as under multiprocessing.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gpu.worker_main", *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors if rendezvous is None else [*descriptors, rendezvous],
                env=_environment(),
            )

    def send(self, payload: bytes) -> bool:
        """False when the worker is gone: its reports tell why."""
        try:
            self.commands.send_bytes(payload)
        except OSError:
            return False
        return True

    @property
    def is_stopped(self) -> bool:
        """A signal stopped it, as SIGSTOP does; a debugger that traces it is no such thing. Linux alone tells."""
        try:
            status = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] == "T"

    def dump_stacks(self) -> None:
        """The worker writes the stacks of its threads to stderr, even while it is busy; one that is stopped goes on to do it."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
            self.process.send_signal(signal.SIGCONT)

    def hang_up(self, how: int = socket.SHUT_WR) -> None:
        """SHUT_WR orders the worker to stop; SHUT_RDWR also wakes a caller that waits for its answer."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.commands.fileno())) as same_socket:
            same_socket.shutdown(how)

    def reap(self, doing: str) -> None:
        """After the end of file; notes how it ended unless it told why."""
        self.reports.close()
        try:
            status = self.process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        if self.trouble is not None:
            return
        if status >= 0:
            self.trouble = Trouble(time.monotonic(), f"rank {self.index} exited with status {status} {doing}")
            return
        # Other ranks may report the loss of this one before its end is seen here. Who aborts, though, may do so for another's loss.
        when = time.monotonic() if -status == signal.SIGABRT else CERTAIN
        hint = " (as the kernel does when memory runs out)" if -status == signal.SIGKILL else ""
        self.trouble = Trouble(when, f"rank {self.index} was killed by signal {-status} {doing}{hint}")

    def log(self, logged: Logged) -> None:
        target = logging.getLogger(logged.name)
        if target.isEnabledFor(logged.level):
            values = {"levelno": logged.level, "levelname": logging.getLevelName(logged.level), "name": logged.name}
            values |= {"msg": logged.message, "created": logged.created, "msecs": logged.created % 1 * 1000}
            values |= {"process": self.process.pid, "processName": f"rank{self.index}"}
            target.handle(logging.makeLogRecord(values))


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    return {
        "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this host: nothing for other hosts to reach
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, *(path or os.getcwd() for path in sys.path)]),
    }
