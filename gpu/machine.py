"""The cores and memory that processes may use on this machine, and the number of threads that an engine starts. Torch-free."""

from __future__ import annotations

import logging
import os
import platform
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from gpu.control_group import cpu_quota, memory_left, memory_limit

logger = logging.getLogger(__name__)

PROCESS = Path("/proc/self")
CPUINFO = Path("/proc/cpuinfo")


def available_cores() -> int:
    """Cores that this process may keep busy: those that it may run on, or whole ones of its quota of time where that is less."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def processor() -> str:
    """Its name, as far as the system tells: machines of one name compute equally fast."""
    try:
        lines = (line.partition(":") for line in CPUINFO.read_text().splitlines())
        return next((value.strip() for name, _, value in lines if name.strip() == "model name"), "")
    except OSError:
        return platform.processor()


def total_memory() -> int:
    """Bytes that the machine has, or its control group may have where that is less."""
    return min(psutil.virtual_memory().total, memory_limit() or sys.maxsize)


def available_memory() -> int:
    """Bytes that this process may still use: the machine's, or what its control group leaves where that is less.

    Pages of files that it has read through a mapping, weights above all, are free to the kernel, not to us: they are read again.
    """
    available = psutil.virtual_memory().available - psutil.Process().memory_info().shared
    left = memory_left()
    return max(0, available if left is None else min(available, left))


def own_memory(pid: int) -> int:
    """Bytes that a process and those that it started hold and share with no file or other process."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return sum(each.memory_info().rss - each.memory_info().shared for each in family)
    except psutil.NoSuchProcess:
        return 0


def passing_memory(work: Callable[[], None]) -> int:
    """Bytes that this process had in memory at `work`'s peak and has no more after it.

    Memory that `work` keeps or has mapped is not among them: `available_memory` counts that. Where the kernel cannot reset the
    peak, it is that of the process's whole life, and the result is too large, never too small.
    """
    try:
        (PROCESS / "clear_refs").write_text("5")  # proc(5): the peak is what is in memory now
    except OSError as error:
        logger.warning("a step's memory is overestimated (%s); --kv-cache-memory-bytes says how much is for KV", error)
    work()
    status = dict(line.split(":", 1) for line in (PROCESS / "status").read_text().splitlines())
    peak = status.get("VmHWM", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss} kB")  # gVisor does not say it
    return max(0, _kib(peak) - _kib(status["VmRSS"])) * 1024


def _kib(text: str) -> int:
    return int(text.removesuffix("kB"))


def compute_threads(cores: int, replicas: int, ranks: int) -> int:
    """Threads of a rank: its part of the cores. One engine leaves a core to the front end, unless there are only two.

    On two cores each of two replicas has two threads: a prompt is theirs when the other one decodes, in one thread, or is idle.
    """
    if cores == 2 and ranks == 1:
        return 2
    if replicas > 1:
        return sure_threads(cores, replicas, ranks)
    return max(1, (cores - 1) // ranks)


def sure_threads(cores: int, replicas: int, ranks: int) -> int:
    """Of a rank: the cores that are its own while all ranks of all replicas compute."""
    return max(1, cores // (replicas * ranks))
