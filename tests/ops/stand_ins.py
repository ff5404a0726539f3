"""Small children for a supervisor."""

from __future__ import annotations

import os
import sys
from typing import Any

import psutil

from ops import child as children
from ops.child import Child, Command

READY = "import os, sys; os.write(int(sys.argv[sys.argv.index('--progress-fd') + 1]), b'{\"phase\": \"ready\"}\\n')"
SLEEP = "import signal; signal.pause()"


def python(*lines: str) -> list[str]:
    return [sys.executable, "-S", "-c", "\n".join(lines)]


def command(name: str, *lines: str, **more: Any) -> Command:
    return Command(name, python(*lines), dict(os.environ), **more)


class Watched:
    """A child, what it printed and what it reported."""

    def __init__(self, command: Command, **more: Any) -> None:
        self.lines: list[str] = []
        self.reports: list[dict[str, Any]] = []
        self.exits: list[children.Exit] = []
        self.child = Child(command, on_line=self.lines.append, on_progress=self.reports.append, on_exit=self._exited, **more)

    async def _exited(self, ended: children.Exit) -> None:
        self.exits.append(ended)


def gone(pid: int) -> None:
    """Waits until no such process is left, or is left unreaped."""
    try:
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            process.wait(10)
    except psutil.NoSuchProcess:
        pass
