"""Where a worker process begins (`python -m gpu.worker_main`, by the executor): bound to its parent before the slow imports."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)
PR_SET_NAME = 15
COLLECT_AFTER = 50_000  # objects more than were freed; torch's import takes a fifth longer with Python's own number, 700


def main() -> int:
    parser = argparse.ArgumentParser(prog="headrace-worker", description="One rank of a model; started by the executor.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--of", type=int, required=True, help="number of ranks")
    parser.add_argument("--parent", type=int, required=True, help="process id of the executor")
    parser.add_argument("--commands", type=int, required=True, help="file descriptor of a socket")
    parser.add_argument("--reports", type=int, required=True, help="file descriptor of a pipe's writing end")
    options = parser.parse_args()
    die_with_parent(options.parent)
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"headrace-rank{options.rank}".encode())
    # Ctrl-C reaches all processes of a terminal; the engine's owner ends them in order. Blocked since before this process began.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # by the engine's watchdog, or by hand
    gc.set_threshold(COLLECT_AFTER, 20, 20)
    for descriptor in (options.commands, options.reports):
        os.set_inheritable(descriptor, False)  # a child that kept them would hide this process's end

    from multiprocessing.connection import Connection

    from gpu.worker import Worker

    return Worker(options.rank, Connection(options.commands), Connection(options.reports, readable=False)).run()


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends, however it ends (Linux)."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it was over before the line above
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
