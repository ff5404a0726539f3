"""Cores that engines of one machine lend each other: a step uses more than one only where others stand idle.

Two engines on two cores each compute in one thread while both are busy, as four threads would take each other's time slices. An
engine that is alone with a prompt, or with one stream, has both. Each core is a byte of a file, locked by the engine that uses it;
the kernel releases the locks of the dead.

An engine keeps one core from step to step, so that no other engine takes it in between, until no step comes for a while. A step
that finds no core free runs nevertheless, in one thread, and its engine says by another byte that it has none: then those that have
two use one from their next step on.
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
# No daemon has it as standard input, as many have /dev/null: dockerd locks all bytes of that, and no core would seem free.
# Its locks belong to one opening of it (OFD locks): a process's own locks would go when it closes any other opening.
SHARED_FILE = Path("/dev/full")
FIRST_BYTE = 0x68656164 << 16  # far from bytes that others may lock there
FIRST_SPARE = 1 << 15  # the number of the first of those that are no core
MOST_WISHES = 256  # engines that can say that they have no core: the bytes before -1, which stands for no engine
_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, pid


class Cores:
    """This process's cores, by their numbers, as bytes of a file that all engines of the machine know.

    `count`: how many at least, where more threads than cores are asked for.
    """

    def __init__(self, count: int, file: Path = SHARED_FILE) -> None:
        numbers = sorted(os.sched_getaffinity(0))
        numbers += range(FIRST_SPARE, FIRST_SPARE + count - len(numbers))
        self._locks = [(_request(fcntl.F_WRLCK, number), _request(fcntl.F_UNLCK, number)) for number in numbers]
        self._held: list[bytes] = []  # the requests that give back what this engine has
        self._wished: bytes | None = None
        self._file = -1
        try:
            self._file = os.open(file, os.O_RDWR | os.O_CLOEXEC)
            self._try_locks()
        except OSError as error:  # then every step takes what it wants
            logger.warning("engines cannot tell each other which cores are busy: %s", error)
            self._locks = []
        self.close = weakref.finalize(self, _close, self._file)

    def _try_locks(self) -> None:
        """Raises OSError where engines cannot lock cores. It tries a byte that stands for no core."""
        if self._take(_request(fcntl.F_WRLCK, -1)):
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, -1))
        elif self._lock_on(-1) == fcntl.F_RDLCK:  # engines lock for writing only
            raise OSError("a program that is no engine has locked the whole file")

    @contextmanager
    def claim(self, most: int) -> Iterator[int]:
        """For a step: up to `most` cores that no other engine holds. Yields how many threads to use: their number, 1 at least.

        One of them is kept until `rest`, or until a step fails.
        """
        if not self._locks:
            yield most
            return
        self._hold(1)
        self._wish(not self._held)
        if most > 1 and self._held and not self._others_wish():
            self._hold(most)
        try:
            yield max(1, len(self._held))
        except BaseException:
            self._keep(0)
            raise
        self._keep(1)

    def rest(self) -> None:
        """No step comes soon."""
        self._keep(0)
        self._wish(False)

    def _hold(self, most: int) -> None:
        for lock, unlock in self._locks:
            if len(self._held) < most and unlock not in self._held and self._take(lock):
                self._held.append(unlock)

    def _keep(self, most: int) -> None:
        while len(self._held) > most:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, self._held.pop())

    def _wish(self, wished: bool) -> None:
        """Says that this engine has no core, or no more that it has none."""
        if wished == (self._wished is not None):
            return
        if self._wished is not None:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, self._wished)
            self._wished = None
            return
        for number in range(-2, -2 - MOST_WISHES, -1):
            if self._take(_request(fcntl.F_WRLCK, number)):
                self._wished = _request(fcntl.F_UNLCK, number)
                return

    def _others_wish(self) -> bool:
        return self._lock_on(-1 - MOST_WISHES, MOST_WISHES) != fcntl.F_UNLCK

    def _lock_on(self, number: int, count: int = 1) -> int:
        """The type of a lock that others have on a core's byte, or on one of `count`; F_UNLCK: there is none."""
        found = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK, number, count))
        return int(_FLOCK.unpack(found)[0])

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


def _request(type: int, number: int, count: int = 1) -> bytes:
    """The struct flock that locks or unlocks a core's byte, or `count` of them."""
    return _FLOCK.pack(type, os.SEEK_SET, FIRST_BYTE + number, count, 0)
