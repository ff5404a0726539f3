"""Cores that engines of one machine lend each other: a step is cut into parts only where cores stand idle.

Two engines on two cores each compute in one thread while both are busy, as four threads would take each other's time slices; an
engine that is alone with a long prompt has both for it. A core is a byte of a file, who has locked it the one that uses it, and the
dead hold no locks. A step in one piece claims one core and runs whether it got it or not; its threads, where there are more than
two, work inside its operations (gpu.runner.step_parts.Team).
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

# It is on every machine and in every container, every user may open it, and no tool removes it, as some remove files in /tmp.
# Its locks belong to one opening of it (OFD locks): a process's own locks would go when it closes any other opening.
SHARED_FILE = Path("/dev/null")
FIRST_BYTE = 0x68656164 << 16  # far from bytes that others may lock there
FIRST_SPARE = 1 << 15  # the number of the first of those that are no core
_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, pid


class Cores:
    """This process's cores, by their numbers, as bytes of a file that all engines of the machine know.

    `count`: how many at least, where more threads than cores are asked for.
    """

    def __init__(self, count: int, file: Path = SHARED_FILE) -> None:
        numbers = sorted(os.sched_getaffinity(0))
        numbers += range(FIRST_SPARE, FIRST_SPARE + count - len(numbers))
        self._locks = [(_request(fcntl.F_WRLCK, number), _request(fcntl.F_UNLCK, number)) for number in numbers]
        self._file = -1
        try:
            self._file = os.open(file, os.O_RDWR | os.O_CLOEXEC)
            self._try_locks()
        except OSError as error:  # then every step takes what it wants
            logger.warning("engines cannot tell each other which cores are busy: %s", error)
            self._locks = []
        self.close = weakref.finalize(self, _close, self._file)

    def _try_locks(self) -> None:
        """Raises OSError where there are no such locks, or they are forbidden. It tries a byte that stands for no core."""
        if self._take(_request(fcntl.F_WRLCK, -1)):
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, -1))

    @contextmanager
    def claim(self, most: int) -> Iterator[int]:
        """Holds up to `most` free cores. Yields how many threads to use: their number, 1 at least."""
        if not self._locks:
            yield most
            return
        held: list[bytes] = []
        try:
            for lock, unlock in self._locks:
                if len(held) < most and self._take(lock):
                    held.append(unlock)
            yield max(1, len(held))
        finally:
            for unlock in held:
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, unlock)

    def _take(self, lock: bytes) -> bool:
        """Locks a core. False: another process holds it."""
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock)
        except BlockingIOError:
            return False
        return True


def _close(file: int) -> None:
    if file >= 0:
        os.close(file)


def _request(type: int, number: int) -> bytes:
    """The struct flock that locks or unlocks a core's byte."""
    return _FLOCK.pack(type, os.SEEK_SET, FIRST_BYTE + number, 1, 0)
