"""Locks between processes: files that the kernel unlocks when their holder ends, however it ends."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


def lock_file(path: Path, why: str) -> int:
    """Waits for the lock of the file `path`, logging `why` where another process holds it. Returns it; raises OSError."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("%s; waiting for it", why)
            fcntl.flock(lock, fcntl.LOCK_EX)
    except BaseException:
        os.close(lock)
        raise
    return lock


def unlock_file(lock: int) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)  # a process forked meanwhile would keep it
    os.close(lock)


@contextmanager
def one_at_a_time(path: Path, why: str) -> Iterator[None]:
    """Of the processes that come here only one is inside. Where the file cannot be locked, all are."""
    try:
        lock = lock_file(path, why)
    except OSError as error:
        logger.warning("%s cannot be locked: %s", path, error)
        yield
        return
    try:
        yield
    finally:
        unlock_file(lock)
