"""The order to stop, as signals."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType


class StopSignals:
    """SIGTERM and SIGINT from the first moment on: one that comes while the model loads ends the process."""

    def __init__(self, timeout: float) -> None:
        """`timeout`: seconds that an engine has to stop after the first of them; after the second it has none."""
        self._timeout = timeout
        self._stop: Callable[[float], None] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def obey_with(self, stop: Callable[[float], None]) -> None:
        """`stop` is called in the signal handler, with the seconds that are left."""
        self._stop = stop

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop is None:
            raise SystemExit(0)
        timeout, self._timeout = self._timeout, 0.0
        self._stop(timeout)
