"""The engine's heartbeat: it stands for a loop that makes progress, not for a process that exists.

Every half second the thread renews the slot's time to live, with the live snapshot. It falls silent when the watchdog sees that the
engine does not get on. API servers or maintenance then declare the engine dead. Redis answers a heartbeat with its time, by which
the engine sets its clock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from engine.bus import leases
from engine.bus.call import BusUnavailable
from engine.bus.clock import BusClock
from engine.bus.leases import BEAT_INTERVAL
from engine.protocol import EngineStats
from engine.runtime.slot_owner import SlotOwner

logger = logging.getLogger(__name__)

SNAPSHOT_SECONDS = 0.2  # that a beat waits for a new snapshot
LEAST_INTERVAL = 0.05  # between two beats, however often the engine falls idle


class Heartbeat:
    """The thread that renews the slot. The loop publishes a snapshot whenever `wants_snapshot` says so, just before a beat, and
    when it falls idle. So what was counted is told half a second later at most."""

    def __init__(
        self,
        owner: SlotOwner,
        gets_on: Callable[[], bool],
        clock: BusClock,
        failed: Callable[[BaseException], None],
        failover_timeout: float = leases.FAILOVER_TIMEOUT,
    ) -> None:
        self.info = owner.info
        self.wants_snapshot = True
        self._owner = owner
        self._failover_timeout = failover_timeout
        self._gets_on = gets_on
        self._clock = clock
        self._failed = failed
        self._stopped = threading.Event()
        self._published = threading.Event()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Beat no more."""
        self._stopped.set()
        self._hurry.set()
        if self._thread.ident is not None:
            self._thread.join(2.0)

    def publish(self, stats: EngineStats, progress: dict[str, int], waiting: dict[str, int]) -> None:
        """Called by the loop: the contents of the next beats."""
        self.info.stats, self.info.progress, self.info.waiting = stats, progress, waiting
        self.wants_snapshot = False
        self._published.set()

    def hurry(self) -> None:
        """Tell the last snapshot at once."""
        self._hurry.set()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(LEAST_INTERVAL):
                if not self._hurry.wait(BEAT_INTERVAL - SNAPSHOT_SECONDS - LEAST_INTERVAL):
                    self._published.clear()
                    self.wants_snapshot = True
                    self._published.wait(SNAPSHOT_SECONDS)
                self._hurry.clear()
                if self._gets_on() and not self._stopped.is_set():
                    self._beat()
        except BaseException as error:
            self._failed(error)

    def _beat(self) -> None:
        asked_at = time.monotonic()
        try:
            info = self.info
            told = self._owner.run(
                leases.beat(info.model, info.slot, info.incarnation, info, failover_timeout=self._failover_timeout)
            )
            self._clock.heard(told, asked_at, time.monotonic())
        except BusUnavailable as error:
            logger.warning("the heartbeat cannot be sent: %s", error)
