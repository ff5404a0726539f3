"""Notices a process that lives and says nothing: it is stopped, or not one of its threads gets on."""

from __future__ import annotations

import asyncio

LOOK_SECONDS = 0.5


class Silence:
    """How long nothing was heard, counted in looks of this process: while it is itself suspended, nobody is late."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds; 0: without end."""
        self.patience = patience
        self._seconds = 0.0
        self._has_begun = False

    def heard(self) -> None:
        self._seconds, self._has_begun = 0.0, True

    async def too_long(self) -> None:
        """Returns when something was heard and then nothing for longer than the patience."""
        loop = asyncio.get_running_loop()
        self._seconds, self._has_begun = 0.0, False
        last = loop.time()
        while not self.patience or self._seconds < self.patience:
            await asyncio.sleep(LOOK_SECONDS)
            now = loop.time()
            if self._has_begun:
                self._seconds += min(now - last, 2 * LOOK_SECONDS)
            last = now
