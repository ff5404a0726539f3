"""The repair of streams that lack output: they saw a gap, were silent for long, or the subscription was cut.

A repair looks up where the request is, and asks its engine for the missing output, or takes it from the record of an ended request.
Each stream has one repair in flight at most. Many streams share one look at Redis and one command to an engine, and the answers set
the pace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from engine.bus import records
from engine.bus.call import BusUnavailable
from engine.bus.connection import AsyncBus
from engine.bus.control import control
from engine.bus.enqueue import AdmissionLimits, enqueue
from engine.bus.queue_place import num_before
from engine.bus.records import Whereabouts
from engine.client.request_stream import RequestStream
from engine.protocol import EngineCoreOutputs, FinishReason, Lack, Replay

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5  # between looks for silent streams, and after Redis was away
REBUILD_SECONDS = 3.0  # that engines have to put back what a wiped Redis has forgotten
ANSWER_SECONDS = 2.0  # after which an engine's answer counts as lost
PAGE = 256  # streams of one look: the event loop serves other tasks between two pages
MOST_ASKED = 8 * PAGE  # streams that wait for an answer, so that Redis never has more than some answers for this subscriber

Place = tuple[str, str, int]  # model, slot and incarnation of an engine


class Repairs:
    """`client`: the incarnation that output is asked for under. `streams` are the client's, by handle."""

    def __init__(self, bus: AsyncBus, client: str, streams: Mapping[int, RequestStream], clock: Callable[[], float]) -> None:
        self._bus = bus
        self._client = client
        self._streams = streams
        self._clock = clock
        self._due: dict[int, None] = {}  # handles, in the order in which their turn comes
        self._asked: dict[int, float] = {}  # handle -> when its engine was asked; oldest first
        self._wake = asyncio.Event()

    # What the subscriber tells. None of it waits.

    def note_gaps(self, handles: Iterable[int]) -> None:
        """These streams lack output. A stream whose repair is in flight needs no other one."""
        wanted = [handle for handle in handles if handle not in self._asked]
        if wanted:
            self._due.update(dict.fromkeys(wanted))
            self._wake.set()

    def note_cut(self) -> None:
        """The subscription was cut: any stream may lack output, and answers may be lost."""
        self._asked.clear()
        self.note_gaps(self._streams)

    def note_answer(self, message: EngineCoreOutputs) -> None:
        """What an engine says on the streams that it was asked about."""
        for handle in (*message.replayed, *message.cut_short, *message.not_held):
            self._asked.pop(handle, None)
        for handle in message.not_held:
            if handle in self._streams:
                self._streams[handle].not_found(self._clock())
        self.note_gaps(message.cut_short)
        self._wake.set()

    # The work

    async def run(self) -> None:
        """For ever."""
        next_look = 0.0
        while True:
            now = self._clock()
            if now >= next_look:
                next_look = now + LOOK_SECONDS
                self._find_silent(now)
            if self._due and len(self._asked) < MOST_ASKED:
                await self._repair_page(now)
            else:
                await self._rest()

    def _find_silent(self, now: float) -> None:
        for handle in [handle for handle, asked in self._asked.items() if now - asked >= ANSWER_SECONDS]:
            del self._asked[handle]
        self.note_gaps([handle for handle, stream in self._streams.items() if now >= stream.next_look])

    async def _rest(self) -> None:
        """Until there may be something to do."""
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self._wake.wait()

    async def _repair_page(self, now: float) -> None:
        handles = list(islice(self._due, PAGE))
        for handle in handles:
            del self._due[handle]
        page = [self._streams[handle] for handle in handles if handle in self._streams]
        for stream in page:
            stream.looked(now)
            self._asked[stream.handle] = now
        try:
            await self.repair(page)
        except BusUnavailable as error:
            logger.warning("%d streams cannot be repaired now: %s", len(page), error)
            for stream in page:
                stream.missed_since = None  # nobody can put a request back while Redis is away
                self._asked.pop(stream.handle, None)
                self._due[stream.handle] = None
            await asyncio.sleep(LOOK_SECONDS)  # Redis gives no sign of its return
        except Exception:  # the others go on, and these are looked at again when they were silent for longer
            logger.exception("%d streams cannot be repaired", len(page))

    async def repair(self, page: Sequence[RequestStream]) -> None:
        """Ask for the output that streams lack, of their engines, or take it from their records. Raises BusUnavailable."""
        was_enqueued = [stream.enqueued for stream in page]  # before the look: until then a record may be on its way
        lacks: defaultdict[Place, list[Lack]] = defaultdict(list)
        places = await self._whereabouts(page)
        await self._note_queued(page, places)
        for stream, place, enqueued in zip(page, places, was_enqueued, strict=True):
            if place is not None:
                stream.missed_since = None
            if place is not None and place.state == "running":
                lacks[stream.model, place.engine, place.incarnation].append(stream.lack())
                continue
            self._asked.pop(stream.handle, None)
            if place is not None:
                await self._take_end(stream, place)
            elif enqueued:
                await self._rebuild_if_missed(stream)
        for engine, theirs in lacks.items():
            await self._bus.run(control(*engine, Replay(self._client, theirs)))

    async def _note_queued(self, page: Sequence[RequestStream], places: Sequence[Whereabouts | None]) -> None:
        """Streams whose requests wait learn how many others wait before them."""
        queued: defaultdict[str, list[tuple[RequestStream, str]]] = defaultdict(list)
        for stream, place in zip(page, places, strict=True):
            stream.num_before = None
            if place is not None and place.state == "queued" and place.entry:
                queued[stream.model].append((stream, place.entry))
        for model, theirs in queued.items():
            found = await self._bus.run(num_before(model, [entry for _, entry in theirs]))
            for (stream, _), number in zip(theirs, found, strict=True):
                stream.num_before = number

    async def _rebuild_if_missed(self, stream: RequestStream) -> None:
        """Redis has forgotten the request. Engines put back what they hold; what none has put back by then is enqueued again. It
        starts anew, and its seed gives the tokens that the stream has, which drops them."""
        now = self._clock()
        if stream.missed_since is None:
            stream.missed_since = now
        elif now - stream.missed_since >= REBUILD_SECONDS and not stream.may_enqueue:
            stream.take_end(FinishReason.ERROR, "The request's record is gone.")
        elif now - stream.missed_since >= REBUILD_SECONDS:
            logger.warning("Redis has forgotten request %s: it is enqueued again", stream.request_id)
            await self._bus.run(enqueue(stream.model, [stream.request], AdmissionLimits(require_engine=False, memory_share=0)))
            stream.missed_since = None
        stream.next_look = now + REBUILD_SECONDS

    async def _whereabouts(self, page: Sequence[RequestStream]) -> list[Whereabouts | None]:
        """In the order of the page."""
        by_model: defaultdict[str, list[str]] = defaultdict(list)
        for stream in page:
            by_model[stream.model].append(stream.request_id)
        found: dict[str, Whereabouts | None] = {}
        for model, ids in by_model.items():
            found.update(zip(ids, await self._bus.run(records.whereabouts(model, ids)), strict=True))
        return [found[stream.request_id] for stream in page]

    async def _take_end(self, stream: RequestStream, place: Whereabouts) -> None:
        """What the record of an ended request says. A stream whose record cannot be read ends with that error."""
        try:
            if place.state == "ended":
                await self._take_stored(stream)
            elif place.state == "unreadable":
                raise ValueError(place.error)
        except BusUnavailable:
            raise
        except Exception:
            logger.exception("the record of request %s cannot be read", stream.request_id)
            stream.take_end(FinishReason.ERROR, "The request's record cannot be read.")

    async def _take_stored(self, stream: RequestStream) -> None:
        """Where Redis was rolled back since the look, the request runs again, or is forgotten: the next look decides."""
        stored = await self._bus.run(records.stored_output(stream.model, stream.request_id))
        if stored is not None:
            stream.take_stored(stored)
        else:
            stream.not_found(self._clock())
