"""Cores that engines of one machine lend each other: a step is cut into parts only where cores stand idle.

Two engines on two cores each compute in one thread while both are busy, as four threads would take each other's time slices; an
engine that is alone with a long prompt has both for it. A core is a file, who has locked it the one that uses it, and the dead hold
no locks. A step in one piece asks nobody: its threads, where there are more than two, work inside its operations (gpu.parts.Team).
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


class Cores:
    """This process's cores, by their numbers, as files in a folder that all of a user's engines know.

    `count`: how many at least, where more threads than cores are asked for.
    """

    def __init__(self, count: int, folder: Path | None = None) -> None:
        numbers = sorted(os.sched_getaffinity(0))
        names = [f"core-{number}" for number in numbers] + [f"more-{number}" for number in range(count - len(numbers))]
        try:
            self._files = _open_files(folder or _shared_folder(), names)
        except OSError as error:  # then every step takes what it wants
            logger.warning("engines cannot tell each other which cores are busy: %s", error)
            self._files = []
        self.close = weakref.finalize(self, _close, self._files)

    @contextmanager
    def claim(self, most: int) -> Iterator[int]:
        """Holds up to `most` cores that nobody holds. Yields how many threads to use: their number, 1 at least."""
        if not self._files:
            yield most
            return
        held: list[int] = []
        try:
            for file in self._files:
                if len(held) < most and _is_free(file):
                    held.append(file)
            yield max(1, len(held))
        finally:
            for file in held:
                fcntl.flock(file, fcntl.LOCK_UN)


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _is_free(file: int) -> bool:
    """Whether nobody held it, who did not; we do now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_files(folder: Path, names: list[str]) -> list[int]:
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is somebody else's")
    files = [os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for name in names]
    for file in files:
        os.utime(file)  # who tidies the folder up takes old files first
    return files


def _shared_folder() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"headrace-cores-{os.getuid()}"
