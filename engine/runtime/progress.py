"""How far an engine is, told to the process that started it."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any


class Progress:
    """One JSON object a line to the process that started this one: {"phase": "load", "fraction": 0.4}, "ready", "failed", and
    from "ready" on, again and again, "alive".

    A failure is `permanent` where fewer engines would fail the same way.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_blocking(fd, False)

    def say(self, phase: str, **facts: Any) -> None:
        if self._fd is not None:
            with suppress(BlockingIOError):  # the reader was stopped for long: it has enough to read
                try:
                    os.write(self._fd, json.dumps({"phase": phase, **facts}).encode() + b"\n")
                except BrokenPipeError:
                    self._fd = None  # the reader is gone

    def alive(self) -> None:
        self.say("alive")

    def loading(self, fraction: float) -> None:
        self.say("load", fraction=fraction)
