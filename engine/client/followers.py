"""Streams that do not listen to their request, because another stream does: they get its output from its record, at the end.

Many retries of one HTTP request share one look at its record. A request that nobody listens to any more is taken up by one of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice

from engine.bus import leases, records
from engine.bus.call import BusUnavailable
from engine.bus.connection import AsyncBus
from engine.bus.records import Whereabouts
from engine.client.request_stream import RequestStream
from engine.protocol import FinishReason

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
PAGE = 256  # requests of one look
LOOKS_WITHOUT_LISTENER = 3  # in a row, after which a follower listens
LOOKS_WITHOUT_RECORD = 100  # in a row, after which it is gone; after a wipe of Redis, engines and API servers put it back before


class Followers:
    """`take_up` makes a stream the one that listens to its request."""

    def __init__(self, bus: AsyncBus, take_up: Callable[[RequestStream], Awaitable[None]]) -> None:
        self._bus = bus
        self._take_up = take_up
        self._following: defaultdict[tuple[str, str], list[RequestStream]] = defaultdict(list)  # by model and request id
        self._unheard: defaultdict[tuple[str, str], int] = defaultdict(int)  # looks in a row that found nobody listening
        self._missed: defaultdict[tuple[str, str], int] = defaultdict(int)  # looks in a row that found no record
        self._some = asyncio.Event()

    def add(self, stream: RequestStream) -> None:
        stream.listens = False
        self._following[stream.model, stream.request_id].append(stream)
        self._some.set()

    def discard(self, stream: RequestStream) -> None:
        streams = self._following.get((stream.model, stream.request_id), [])
        if stream in streams:
            streams.remove(stream)
            if not streams:
                self._drop((stream.model, stream.request_id))

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._some.wait()
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._look()
            except BusUnavailable:
                pass  # the next look finds it
            except Exception:
                logger.exception("a look at followed requests broke off")
            if not self._following:
                self._some.clear()

    async def _look(self) -> None:
        by_model: defaultdict[str, list[str]] = defaultdict(list)
        for model, request_id in self._following:
            by_model[model].append(request_id)
        for model, ids in by_model.items():
            rest = iter(ids)
            while page := list(islice(rest, PAGE)):
                places = await self._bus.run(records.whereabouts(model, page))
                listening = await self._bus.run(leases.living_apis({place.client for place in places if place is not None}))
                for request_id, place in zip(page, places, strict=True):
                    await self._deal_with((model, request_id), place, listening)

    async def _deal_with(self, request: tuple[str, str], place: Whereabouts | None, listening: frozenset[str]) -> None:
        if place is None:
            self._missed[request] += 1
            if self._missed[request] >= LOOKS_WITHOUT_RECORD:
                self._end_all(request, "The request's record is gone.")
            return
        self._missed.pop(request, None)
        if place.state == "ended":
            await self._hand_out(request)
        elif place.state == "unreadable":
            self._end_all(request, "The request's record cannot be read.")
        elif place.detached or place.client not in listening:
            self._unheard[request] += 1
            if self._unheard[request] >= LOOKS_WITHOUT_LISTENER and request in self._following:
                stream = self._following[request][0]
                self.discard(stream)
                await self._take_up(stream)
        else:
            self._unheard.pop(request, None)

    async def _hand_out(self, request: tuple[str, str]) -> None:
        """The stored output, to all that follow the request. Where Redis was rolled back since the look, the next look decides."""
        stored = await self._bus.run(records.stored_output(*request))
        if stored is None:
            return
        for stream in self._drop(request):
            stream.take_stored(stored)
            await asyncio.sleep(0)  # a long output keeps the event loop for some time

    def _end_all(self, request: tuple[str, str], error: str) -> None:
        for stream in self._drop(request):
            stream.take_end(FinishReason.ERROR, error)

    def _drop(self, request: tuple[str, str]) -> Iterable[RequestStream]:
        self._unheard.pop(request, None)
        self._missed.pop(request, None)
        return self._following.pop(request, [])
