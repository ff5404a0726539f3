"""How far an engine is, told to the process that started it."""

from __future__ import annotations

import json
import os
from typing import Any


class Progress:
    """One JSON object a line to the process that started this one: {"phase": "load", "fraction": 0.4}, "ready", "failed".

    A failure is `permanent` where fewer engines would fail the same way.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def say(self, phase: str, **facts: Any) -> None:
        if self._fd is not None:
            try:
                os.write(self._fd, json.dumps({"phase": phase, **facts}).encode() + b"\n")
            except BrokenPipeError:
                self._fd = None  # the reader is gone

    def loading(self, fraction: float) -> None:
        self.say("load", fraction=fraction)
