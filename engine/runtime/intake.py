"""Two threads that read from Redis: requests, as many as can soon run, and control commands.

Pub/sub only rings a bell; the stream and the order set are the truth, and are looked at several times a second without any bell.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.bus import control, keys, transitions
from engine.bus.call import BusUnavailable, Call
from engine.bus.connection import Bus
from engine.bus.transitions import Taken
from engine.protocol import INVALID_REQUEST, Abort, ControlCommand, EngineCoreRequest, decode_request
from engine.runtime.core import EngineCore, Unrunnable
from engine.runtime.folding import FoldedOutput
from engine.scheduling.request import Request

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.2  # the longest that a lost bell can delay a request or a command


@dataclass(frozen=True)
class Arrival:
    """A request taken from the stream, and its choices."""

    source: EngineCoreRequest
    choices: list[Request]
    folded: FoldedOutput | None = None  # what dead engines made of it: the choices go on behind that
    orders: tuple[Abort, ...] = ()  # ends that were ordered of a dead engine


class Intake:
    """The threads that fill the loop's inbox, with as much as the core will soon have room for.

    A request that cannot be read, or that the core cannot run, is ended here: the loop meets only such as it can run.
    """

    def __init__(
        self,
        bus: Bus,
        model: str,
        slot: str,
        incarnation: int,
        inbox: queue.SimpleQueue[Arrival | ControlCommand | None],
        core: EngineCore,
        failed: Callable[[BaseException], None],
    ) -> None:
        self.num_admitted = 0  # written by the loop: arrivals that reached the scheduler
        self.paused = False  # asleep or draining: the backlog stays in Redis
        self.closed = False  # for good: the engine stops
        self.wants_room = False  # there was no room at the last look: `ring` when there is some
        self._num_taken = 0
        self._places_said = 0  # places that this engine last told the others
        self._unanswered: Call[list[Taken]] | None = None  # a take whose answer was lost: it may own requests already
        self._bus = bus
        self._model, self._slot, self._incarnation = model, slot, incarnation
        self._inbox = inbox
        self._core = core
        self._failed = failed
        self._bell = threading.Event()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in (("intake", self._take_requests), ("control", self._take_commands))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._bell.set()

    def join(self, timeout: float) -> None:
        """Wait for the threads to see `stop`."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout)

    def ring(self) -> None:
        """There may be something to take, or room for it."""
        self._bell.set()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._failed(error)

    def _take_requests(self) -> None:
        while not self._stopped.is_set():
            self._bell.clear()
            if not self._take_once():
                self._bell.wait(LOOK_SECONDS)

    def _take_once(self) -> bool:
        """Take what there is room for; False when there was nothing to take, no room, or what waits is for others to take.

        An engine that has come to have fewer places than it said asks for none, to say so.
        """
        room, places = self._room()
        if room <= 0 and places >= self._places_said and self._unanswered is None:
            return False
        call = self._unanswered
        if call is None:
            call = transitions.take(self._model, self._slot, self._incarnation, room, places)
            self._places_said = places
        try:
            entries = self._bus.run(call)
        except BusUnavailable as error:
            logger.warning("no requests can be taken from Redis: %s", error)
            self._unanswered = call
            return False
        self._unanswered = None
        self._places_said -= min(len(entries), self._places_said)
        for taken in entries:
            self._hand_over(taken)
        return bool(entries)

    def _room(self) -> tuple[int, int]:
        """How many requests to take now, and how many more could run: the others leave to this engine its share of those."""
        if self.paused or self.closed:
            self.wants_room = False
            return 0, 0
        coming = self._num_taken - self.num_admitted
        room = self._core.scheduler.num_free_request_slots - coming
        self.wants_room = room <= 0
        return max(0, room), max(0, self._core.scheduler.num_free_places - coming)

    def _hand_over(self, taken: Taken) -> None:
        try:
            source = decode_request(taken.payload)
            arrival = Arrival(source, self._core.make_requests(source, taken.enqueued, taken.taken))
        except (msgspec.DecodeError, Unrunnable) as error:
            self._reject(taken.entry, f"{INVALID_REQUEST}{error}")
        except Exception as error:  # a bad request ends itself alone
            logger.exception("entry %s cannot be taken in", taken.entry)
            self._reject(taken.entry, f"The engine cannot take the request in: {type(error).__name__}: {error}")
        else:
            self._num_taken += 1
            self._inbox.put(arrival)

    def _reject(self, entry_id: str, why: str) -> None:
        """Until Redis has heard it: the entry is this engine's, and no other process will end it."""
        logger.warning("entry %s ends: %s", entry_id, why)
        call = transitions.reject(self._model, self._slot, self._incarnation, entry_id, why)
        while not self._stopped.is_set():
            try:
                self._bus.run(call)
                return
            except BusUnavailable as error:
                logger.warning("the rejection of an entry waits for Redis: %s", error)

    def _take_commands(self) -> None:
        last_id = "0"
        channels = (keys.wake_channel(self._model), keys.control_channel(self._model, self._slot))
        is_away = False
        while not self._stopped.is_set():
            try:
                with self._bus.subscribe(*channels) as subscription:
                    is_away = False
                    self._bell.set()  # what arrived before the subscription rang no bell here
                    while not self._stopped.is_set():
                        batch = self._bus.run(control.read_control(self._model, self._slot, self._incarnation, last_id))
                        last_id = batch.last_id
                        for command in batch.commands:
                            self._inbox.put(command)
                        if subscription.get(LOOK_SECONDS) is not None:
                            self._bell.set()
            except BusUnavailable as error:
                if not is_away:  # told once, not at every try
                    logger.warning("no commands can be read from Redis: %s", error)
                is_away = True
                self._stopped.wait(0.1)
