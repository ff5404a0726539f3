"""The order to stop, as signals."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType


class StopSignals:
    """SIGTERM and SIGINT from the first moment on: one that comes while the model loads is remembered and obeyed."""

    def __init__(self) -> None:
        self.received = False
        self._obey: Callable[[], None] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def obey_with(self, stop: Callable[[], None]) -> None:
        self._obey = stop
        if self.received:
            stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if self._obey is not None:
            self._obey()
        else:
            raise SystemExit(0)
