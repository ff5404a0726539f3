"""Children die with the supervisor, also by kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from ops import parent_death
from tests.ops.stand_ins import READY, SLEEP, gone

SUPERVISED = f"""
import asyncio, os, sys
from ops.child import Child, Command
from ops.supervise import Supervisor
async def bring_up(supervisor):
    command = Command("child", [sys.executable, "-S", "-c", {(READY + chr(10) + SLEEP)!r}], dict(os.environ))
    child = Child(command, on_line=print, on_progress=print)
    supervisor.start(child)
    await child.ready.wait()
    print(child.pid, flush=True)
async def main():
    supervisor = Supervisor()
    return await supervisor.run(bring_up(supervisor))
sys.exit(asyncio.run(main()))
"""


@pytest.fixture
def supervised() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A supervisor in a process of its own, and the pid of its child."""
    with subprocess.Popen([sys.executable, "-c", SUPERVISED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the child's report
        yield process, int(process.stdout.readline())
        process.kill()


def test_kill_9_of_the_supervisor_takes_its_children_along(supervised: tuple[subprocess.Popen[str], int]) -> None:
    process, child = supervised
    process.kill()
    process.wait()
    gone(child)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_the_exit_status_reaches_the_shell(supervised: tuple[subprocess.Popen[str], int]) -> None:
    process, child = supervised
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert not psutil.pid_exists(child)


def test_a_command_is_not_started_for_a_parent_that_has_died() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", parent_death.__file__, "1", "echo", "started"], capture_output=True, timeout=10
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


def test_a_command_that_does_not_exist_is_an_error() -> None:
    wrapped = parent_death.bound_to_parent(["/no/such/command"])
    done = subprocess.run(wrapped, capture_output=True, text=True, timeout=10)
    assert (done.returncode, done.stderr) == (os.EX_CONFIG, "cannot start /no/such/command: No such file or directory\n")
