"""Two threads that read from Redis: requests, as many as can soon run, and control commands.

Pub/sub only rings a bell; the stream and the order set are the truth, and are looked at several times a second without any bell.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec

from engine.bus import control, keys, transitions
from engine.bus.call import BusUnavailable, Call, Fenced
from engine.bus.transitions import Taken
from engine.fault_points import reach
from engine.protocol import (
    INVALID_REQUEST,
    Abort,
    EngineCoreRequest,
    decode_request,
)
from engine.runtime.core import EngineCore, Unrunnable
from engine.runtime.folding import FoldedOutput
from engine.runtime.orphan_outputs import OrphanOutputs
from engine.runtime.owned_requests import OwnedRequest, OwnedRequests
from engine.runtime.reconciliation import INTERVAL as RECONCILE_SECONDS
from engine.runtime.reconciliation import Reconciler
from engine.runtime.retries import insist
from engine.runtime.slot_owner import SlotOwner
from engine.scheduling.request import TOKEN_BYTES, Request

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_SECONDS = 0.2  # the longest that a lost bell can delay a request
COMMANDS_SECONDS = 1.0  # and a command: each has a bell of its own, and a lost connection is noticed


@dataclass(frozen=True)
class Arrival:
    """A request taken from the stream, and its choices."""

    source: EngineCoreRequest
    choices: list[Request]
    folded: FoldedOutput | None = None  # what dead engines made of it: the choices go on behind that
    orders: tuple[Abort, ...] = ()  # ends that were ordered of a dead engine
    grammar: Future[str] | None = None  # why its grammar cannot be compiled, or ""; None: it has none


class Room(NamedTuple):
    """What an engine says with a take."""

    choices: int  # to take now
    places: int  # choices that could run more: the other engines leave to this one its share of those
    tokens: int  # that the KV cache has blocks for


class Intake:
    """The threads that fill the loop's inbox, with as much as the core will soon have room for.

    A request that cannot be read, or that the core cannot run, is ended here: the loop meets only such as it can run.
    """

    def __init__(
        self,
        owner: SlotOwner,
        owned: OwnedRequests,
        reconciler: Reconciler,
        inbox: queue.SimpleQueue[Any],
        core: EngineCore,
        failed: Callable[[BaseException], None],
    ) -> None:
        self.num_admitted = 0  # written by the loop: choices that reached the scheduler
        self.tokens_admitted = 0  # and the tokens of their prompts, counted once
        self.paused = False  # asleep: the backlog stays in Redis
        self.closed = False  # for good: the engine stops
        self.wants_room = False  # there was no room at the last look: `ring` when there is some
        self._num_taken = 0  # choices
        self._tokens_taken = 0
        self._num_takes = 0
        self._places_said = 0  # places that this engine last told the others
        self._unanswered: Call[list[Taken]] | None = None  # a take whose answer was lost: it may own requests already
        self._owner = owner
        self._owned = owned
        self._reconciler = reconciler
        self._reconciled_at = time.monotonic()
        self._orphan_outputs = OrphanOutputs(owner, self._insist)
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

    def attach(self, source: EngineCoreRequest) -> None:
        """A request that was taken is attached to the API server that `source` names now."""
        self._owned.attach(source.request_id, source)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._failed(error)

    def _take_requests(self) -> None:
        while not self._stopped.is_set():
            self._bell.clear()
            try:
                self._reconcile_if_due()
                took_some = self._take_once()
            except BusUnavailable as error:
                logger.warning("no requests can be taken from Redis: %s", error)
                took_some = False
            if not took_some:
                self._bell.wait(LOOK_SECONDS)

    def _reconcile_if_due(self) -> None:
        must = self._owner.must_reconcile
        if must.is_set() or time.monotonic() - self._reconciled_at >= RECONCILE_SECONDS:
            must.clear()
            self._reconciled_at = time.monotonic()
            try:
                self._reconciler.run()
            except BusUnavailable:
                must.set()
                raise

    def _take_once(self) -> bool:
        """Take what there is room for; False when there was nothing to take, no room, or what waits is for others to take.

        An engine that has come to have fewer places than it said asks for none, to say so. Raises BusUnavailable.
        """
        room = self._room()
        if room.choices <= 0 and room.places >= self._places_said and self._unanswered is None:
            return False
        with self._owned.taking:
            call = self._unanswered or self._next_take(room)
            self._unanswered = call
            entries = self._owner.run(call)
            self._unanswered = None
            if entries:
                reach("after-take")
            arrivals = self._own(entries)
        for taken, source in arrivals:
            self._places_said = max(0, self._places_said - source.sampling.n)
            self._num_taken += source.sampling.n
            self._tokens_taken += len(source.prompt_token_ids) // TOKEN_BYTES
            self._hand_over(taken, source)
        self._orphan_outputs.forget_journals()
        return bool(entries)

    def _next_take(self, room: Room) -> Call[list[Taken]]:
        self._num_takes += 1
        self._places_said = room.places
        owner = self._owner
        return transitions.take(
            owner.model,
            owner.slot,
            owner.incarnation,
            owner.fingerprint,
            self._num_takes,
            room.choices,
            room.places,
            room.tokens,
            may_suspect=not self._owned.any_suspect,
        )

    def _own(self, entries: list[Taken]) -> list[tuple[Taken, EngineCoreRequest]]:
        """Note what was taken; what cannot be read ends."""
        arrivals: list[tuple[Taken, EngineCoreRequest]] = []
        for taken in entries:
            try:
                source = decode_request(taken.payload)
            except msgspec.DecodeError as error:
                self._reject(taken.entry, f"{INVALID_REQUEST}{error}")
                continue
            if (source.client, source.handle, source.priority) != (taken.client, taken.handle, taken.priority):
                source = msgspec.structs.replace(source, client=taken.client, handle=taken.handle, priority=taken.priority)
            if self._owned.get(source.request_id) is not None:  # its take was sent twice, or rolled back: it is one request
                logger.warning("request %s is held already", source.request_id)
                continue
            self._owned.add(OwnedRequest(source, taken.orphan.attempts if taken.orphan else 0))
            arrivals.append((taken, source))
        return arrivals

    def _room(self) -> Room:
        if self.paused or self.closed:
            self.wants_room = False
            return Room(0, 0, 0)
        scheduler = self._core.scheduler
        coming = self._num_taken - self.num_admitted
        tokens = scheduler.num_free_tokens - (self._tokens_taken - self.tokens_admitted)
        count = scheduler.num_free_request_slots - coming
        if tokens <= 0 and (coming or scheduler.has_work):
            count = 0
        self.wants_room = count <= 0
        return Room(max(0, count), max(0, scheduler.num_free_places - coming), tokens)

    def _hand_over(self, taken: Taken, source: EngineCoreRequest) -> None:
        try:
            orphan = taken.orphan
            folded = self._orphan_outputs.fold(source, orphan) if orphan else None
            if folded:
                reach("folded")
            choices = self._core.make_requests(source, taken.enqueued, taken.taken, folded)
            grammar = self._core.compile_grammar(source.sampling.grammar) if source.sampling.grammar else None
            self._inbox.put(Arrival(source, choices, folded, orphan.orders if orphan else (), grammar))
            if grammar is not None:
                grammar.add_done_callback(lambda compiled: self._inbox.put(None))  # the loop may admit it now
        except (BusUnavailable, Fenced):  # the engine stops, and the request is the next one's
            raise
        except Unrunnable as error:
            self._give_up(taken, source, f"{INVALID_REQUEST}{error}")
        except Exception as error:  # a bad request ends itself alone
            logger.exception("entry %s cannot be taken in", taken.entry)
            self._give_up(taken, source, f"The engine cannot take the request in: {type(error).__name__}: {error}")

    def _insist(self, call: Call[T]) -> T:
        """What was taken must get on. Raises BusUnavailable when the engine stops before Redis answers."""
        return insist(lambda: self._owner.run(call), self._stopped, "a request that was taken")

    def _give_up(self, taken: Taken, source: EngineCoreRequest, why: str) -> None:
        self._num_taken -= source.sampling.n  # it does not come to the loop
        self._tokens_taken -= len(source.prompt_token_ids) // TOKEN_BYTES
        self._reject(taken.entry, why)
        self._owned.remove([source.request_id])

    def _reject(self, entry_id: str, why: str) -> None:
        """Until Redis has heard it: the entry is this engine's, and no other process will end it."""
        logger.warning("entry %s ends: %s", entry_id, why)
        owner = self._owner
        with suppress(BusUnavailable):  # the engine stops: the next one rejects it
            self._insist(transitions.reject(owner.model, owner.slot, owner.incarnation, entry_id, why))

    def _take_commands(self) -> None:
        last_id = "0"
        owner = self._owner
        wake, told = keys.wake_channel(owner.model, owner.slot), keys.control_channel(owner.model, owner.slot)
        is_away = False
        while not self._stopped.is_set():
            try:
                with owner.bus.subscribe(wake, told) as subscription:
                    if is_away:
                        owner.must_reconcile.set()
                    is_away = False
                    self._bell.set()  # what arrived before the subscription rang no bell here
                    next_read = 0.0
                    while not self._stopped.is_set():
                        if time.monotonic() >= next_read:
                            last_id = self._read_commands(last_id)
                            next_read = time.monotonic() + COMMANDS_SECONDS
                        message = subscription.get(LOOK_SECONDS)
                        if message is not None:
                            self._bell.set()
                            if message[0] == told:
                                next_read = 0.0
            except BusUnavailable as error:
                if not is_away:  # told once, not at every try
                    logger.warning("no commands can be read from Redis: %s", error)
                is_away = True
                self._stopped.wait(0.1)

    def _read_commands(self, last_id: str) -> str:
        """Hand the commands behind `last_id` to the loop; returns the id of the last one."""
        owner = self._owner
        batch = owner.bus.run(control.read_control(owner.model, owner.slot, owner.incarnation, last_id))
        for command in batch.commands:
            if isinstance(command, Abort):
                reach("stop-ordered")
            self._inbox.put(command)
        return batch.last_id
