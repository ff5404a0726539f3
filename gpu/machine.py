"""What processes may use of this machine: cores and memory, and how many threads an engine makes of the cores. Torch-free."""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

PROCESS = Path("/proc/self")
CONTROL_GROUP = Path("/sys/fs/cgroup")  # of a container, where its own is the only one that it sees


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def total_memory() -> int:
    """Bytes that the machine has, or its control group may have where that is less."""
    return min(psutil.virtual_memory().total, _memory_limit() or sys.maxsize)


def available_memory() -> int:
    """Bytes that this process may still use: the machine's, or what its control group leaves where that is less.

    Pages of files that it has read through a mapping, weights above all, are free to the kernel, not to us: they are read again.
    """
    available = psutil.virtual_memory().available - psutil.Process().memory_info().shared
    if limit := _memory_limit():
        available = min(available, limit - _used_memory(CONTROL_GROUP))
    return max(0, available)


def _memory_limit() -> int | None:
    """Of the control group (version 2); None where it has none."""
    limit = CONTROL_GROUP / "memory.max"
    text = limit.read_text().strip() if limit.is_file() else "max"
    return None if text == "max" else int(text)


def _used_memory(group: Path) -> int:
    """Bytes of a control group (version 2) that its limit would not get back by dropping what it has cached of files.

    memory.current counts those too, up to the limit where a checkpoint was read or a file was written. What somebody has mapped of
    them is in use.
    """
    counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    cached = int(counts["inactive_file"]) + int(counts["active_file"])  # not tmpfs
    return int((group / "memory.current").read_text()) - max(0, cached - int(counts["file_mapped"]))


def passing_memory(work: Callable[[], None]) -> int:
    """Bytes that this process had in memory at `work`'s peak and has no more after it.

    What `work` keeps or has mapped is not among them: `available_memory` knows of that. Where the kernel does not let the peak
    begin anew it is that of the process's whole life: then this says too much, never too little.
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
    """Of a rank: its part of the cores. One engine leaves a core to the front end, save on two cores, where that takes too little.

    On two cores each of two replicas has two threads: a prompt is theirs when the other one decodes, in one thread, or is idle.
    """
    if cores == 2 and ranks == 1:
        return 2
    if replicas > 1:
        return max(1, cores // (replicas * ranks))
    return max(1, (cores - 1) // ranks)
