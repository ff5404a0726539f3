"""The CPU time and memory that the control groups of this process allow, by versions 1 and 2. Torch-free.

Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/scheduler/sched-bwc.html (version 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROCESS = Path("/proc/self")
MOUNT = Path("/sys/fs/cgroup")


def cpu_quota() -> float | None:
    """Cores' worth of time that this process and the others of its group may use; None: as much as there is."""
    quotas = [_quota_of(group) for group in _groups("cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_limit() -> int | None:
    """Bytes that the tightest group may have; None: as many as there are."""
    return min((limit for limit, _ in _limited()), default=None)


def memory_left() -> int | None:
    """Bytes that the fullest group may still take; None: as many as there are."""
    return min((limit - _used_memory(group) for limit, group in _limited()), default=None)


def _groups(controller: str) -> Iterator[Path]:
    """This process's group and those that it is in, as far as they can be seen. A container sees its own as the root of all."""
    for line in _lines(PROCESS / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root = MOUNT
        elif controller in controllers.split(","):
            root = MOUNT / controller
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        if ".." not in own.parts:
            yield from (root / each for each in (own, *own.parents) if (root / each).is_dir())


def _quota_of(group: Path) -> float | None:
    if (words := _words(group / "cpu.max")) and words[0] != "max":  # version 2: quota and period in microseconds
        return int(words[0]) / int(words[1])
    quota, period = _words(group / "cpu.cfs_quota_us"), _words(group / "cpu.cfs_period_us")
    if quota and period and int(quota[0]) > 0:
        return int(quota[0]) / int(period[0])
    return None


def _limited() -> Iterator[tuple[int, Path]]:
    """Limit and directory of each group that has one. Version 1 has a number beyond all memory where there is none."""
    for group in _groups("memory"):
        words = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
        if words and words[0] != "max" and int(words[0]) < 1 << 60:
            yield int(words[0]), group


def _used_memory(group: Path) -> int:
    """Bytes of a group that its limit would not get back by dropping what it has cached of files.

    The kernel counts those too, up to the limit where a checkpoint was read or a file was written. Mapped memory is in use.
    """
    counts = dict(line.split() for line in _lines(group / "memory.stat"))
    below = "total_" if "total_inactive_file" in counts else ""  # version 1 counts the group alone, and all below it
    inactive, active, mapped = (int(counts.get(below + name, 0)) for name in ("inactive_file", "active_file", "mapped_file"))
    mapped = int(counts.get("file_mapped", mapped))  # version 2's name
    used = _words(group / "memory.current") or _words(group / "memory.usage_in_bytes")
    return int(used[0]) - max(0, inactive + active - mapped)  # of files, not tmpfs


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no such version, or not shown to this process
        return []
