"""What processes may use of this machine: cores and memory, and how many threads an engine makes of the cores. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def available_memory() -> int:
    """Bytes that this process may still use: the machine's, or what its control group leaves where that is less.

    Pages of files that it has read through a mapping, weights above all, are free to the kernel, not to us: they are read again.
    """
    available = psutil.virtual_memory().available - psutil.Process().memory_info().shared
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return max(0, available)


def compute_threads(cores: int, replicas: int, ranks: int) -> int:
    """Of a rank: its part of the cores. One engine leaves a core to the front end, save on two cores, where that takes too little.

    On two cores each of two replicas has two threads: a prompt is theirs when the other one decodes, in one thread, or is idle.
    """
    if cores == 2 and ranks == 1:
        return 2
    if replicas > 1:
        return max(1, cores // (replicas * ranks))
    return max(1, (cores - 1) // ranks)
