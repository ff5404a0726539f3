"""Runs a command that cannot outlive its parent: `python parent_death.py PARENT COMMAND...`.

It asks the kernel for SIGKILL at the parent's death, which holds across exec, and becomes the command. A wrapper and not a hook
between fork and exec: the hook would run Python in a forked copy of a process with threads. Where the parent died before the
kernel was asked, the parent's number has changed, and the command is not started.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)


def bound_to_parent(command: list[str]) -> list[str]:
    """`command` so wrapped that it dies with the calling thread. Start it from the main thread, which lives longest."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def die_with_parent(parent: int) -> None:
    """Have the calling process killed when process `parent`, which started it, ends. Linux alone knows this; a no-op elsewhere."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    die_with_parent(int(arguments[0]))
    try:
        os.execvp(arguments[1], arguments[1:])
    except OSError as error:
        print(f"cannot start {arguments[1]}: {error.strerror}", file=sys.stderr)
        sys.exit(os.EX_CONFIG)


if __name__ == "__main__":
    main(sys.argv[1:])
