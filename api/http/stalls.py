"""Peers that take nothing of what is written to them: they read nothing, or their network is gone without a word."""

from __future__ import annotations

import asyncio
import fcntl
import math
import struct
import termios
from collections.abc import Callable

LOOKS = 8  # in the time after which a peer counts as stalled


class StallWatch:
    """Looks, while it is on, whether the bytes that wait for the peer become fewer. `stalled` is called, with their number, when
    they have not for `seconds`; 0: never. Nothing may be written meanwhile."""

    def __init__(self, transport: asyncio.Transport, seconds: float, stalled: Callable[[int], None]) -> None:
        self._transport = transport
        self._seconds = seconds
        self._stalled = stalled
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = math.inf  # bytes at the last look
        self._since = 0.0  # the loop's time: when they last became fewer

    def start(self) -> None:
        """Idempotent."""
        if self._timer is None and self._seconds:
            self._waiting = math.inf
            self._look()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        waiting, now = _waiting_bytes(self._transport), self._loop.time()
        if waiting < self._waiting:
            self._since = now
        self._waiting = waiting
        if waiting and now - self._since >= self._seconds:
            self._timer = None
            self._stalled(waiting)
        else:
            self._timer = self._loop.call_later(self._seconds / LOOKS, self._look)


def _waiting_bytes(transport: asyncio.Transport) -> int:
    """Bytes that the peer has not acknowledged: in the transport, and in the kernel, whose buffer may take minutes to have room."""
    try:
        in_kernel = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:  # this system does not tell, or the socket is gone
        in_kernel = bytes(4)
    return transport.get_write_buffer_size() + int(struct.unpack("i", in_kernel)[0])
