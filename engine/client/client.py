"""The asyncio client of the bus, through which an API server adds, follows, stops and aborts requests, and asks engines.

An API server has one client. The client subscribes to its own channel before it enqueues a request. It keeps the API server's
liveness key and watches the engines' heartbeats. It has streams repaired after a gap, after silence, and after every reconnect
(`engine.client.repairs`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from engine.bus import leases, records, transitions
from engine.bus.attachments import Attachment, attach, detach
from engine.bus.call import BusUnavailable, Call
from engine.bus.connection import AsyncBus
from engine.bus.control import control
from engine.bus.enqueue import AdmissionLimits, Enqueued, enqueue
from engine.bus.records import RecordView
from engine.bus.tokenizers import get_tokenizer
from engine.bus.transitions import FinishOutcome
from engine.client.abort import AbortResult, Replies, abort
from engine.client.discovery import Directory, ModelHandle
from engine.client.followers import Followers
from engine.client.listener import Listener
from engine.client.repairs import Repairs
from engine.client.request_stream import Receiver, RequestStream
from engine.protocol import (
    FOREVER,
    LATE,
    Abort,
    ControlReply,
    EngineCoreRequest,
    EngineInfo,
    FinishReason,
    TokenizerBundle,
    Utility,
    decode_request,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
HOUSEKEEPING_SECONDS = 0.5
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.05, 2.0  # while Redis is away
TAKEN_UP_ELSEWHERE = "The stream of this request goes on at another connection."


class AsyncClient:
    """`on_failure` is called when a background task dies of anything but Redis being away: the process must stop then."""

    def __init__(
        self, bus: AsyncBus, on_failure: Callable[[BaseException], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.incarnation = ""  # given by Redis at `start`
        self.directory = Directory(bus)
        self._bus = bus
        self._clock = clock
        self._on_failure = on_failure
        self._handles = itertools.count(1)
        self._streams: dict[int, RequestStream] = {}
        self._replies = Replies("")
        self._repairs = Repairs(bus, "", self._streams, clock)
        self._listener = self._make_listener()
        self._followers = Followers(bus, self._take_up)
        self._tasks: set[asyncio.Task[Any]] = set()  # for as long as this client lives
        self._errands: set[asyncio.Task[Any]] = set()  # aborts that no coroutine awaits
        self._graces: set[asyncio.Task[Any]] = set()  # of requests that outlive their clients

    # Life

    async def start(self) -> None:
        """Announce this server and subscribe to its channel; raises BusUnavailable when Redis is away, UnfitRedis."""
        self.incarnation = await self._bus.run(leases.announce_api())
        self._replies = Replies(self.incarnation)
        self._repairs = Repairs(self._bus, self.incarnation, self._streams, self._clock)
        self._listener = self._make_listener()
        subscribed = asyncio.get_running_loop().create_future()
        self._spawn(self._listener.run(subscribed), self._tasks)
        await subscribed
        await self.directory.refresh()
        await self.directory.check_admission()
        for work in (self._beat(), self._housekeep(), self._repairs.run(), self._followers.run()):
            self._spawn(work, self._tasks)

    def _make_listener(self) -> Listener:
        return Listener(self._bus, self.incarnation, self._streams, self._repairs, self._replies, self._detached, self._clock)

    async def close(self) -> None:
        """Stop following. Maintenance ends the requests that are still open."""
        if self._errands:
            await asyncio.wait(self._errands, timeout=2.0)
        await _cancel(self._tasks | self._errands | self._graces)
        if self.incarnation:
            with contextlib.suppress(BusUnavailable):
                await self._bus.run(leases.release_api(self.incarnation))

    # Requests

    def next_handle(self) -> int:
        return next(self._handles)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    async def add(
        self,
        model: str,
        requests: list[EngineCoreRequest],
        receivers: Sequence[Receiver],
        limits: AdmissionLimits,
    ) -> list[RequestStream]:
        """Enqueue a prompt list, whole or not at all; `receivers`, one a request, may get output before this returns.

        Raises Refused, Repeated, BusUnavailable. In any case but success the client forgets the streams and ends the requests that
        may have reached Redis.
        """
        streams = self._open_streams(model, requests, receivers)
        try:
            outcome = await self._bus.run(enqueue(model, requests, limits))
        except BaseException:
            for stream in streams:
                self._forget(stream)
                self._errand(self._end(stream, Abort(stream.request_id)))
            raise
        if not isinstance(outcome, Enqueued):
            for stream in streams:
                self._forget(stream)
            raise outcome
        for place, stream in enumerate(streams):
            stream.enqueued = True
            stream.num_before = outcome.num_before + place
        return streams

    async def attach(self, model: str, requests: list[EngineCoreRequest], receivers: Sequence[Receiver]) -> list[RequestStream]:
        """Listen to requests that any API server has enqueued, with handles of this client, from their first token on. Streams that
        listened to them before do not any more. The prompts need not be known, only their lengths. Raises BusUnavailable."""
        streams = self._open_streams(model, requests, receivers)
        for stream in streams:
            stream.may_enqueue = False
        try:
            await self._listen_to(model, streams)
        except BaseException:
            for stream in streams:
                self._forget(stream)
            raise
        return streams

    def follow(self, model: str, requests: list[EngineCoreRequest], receivers: Sequence[Receiver]) -> list[RequestStream]:
        """Get the output of such requests when they have ended, and leave the streams alone that listen to them."""
        streams = self._new_streams(model, requests, receivers)
        for stream in streams:
            stream.may_enqueue = False
            self._followers.add(stream)
        return streams

    def _new_streams(self, model: str, requests: list[EngineCoreRequest], receivers: Sequence[Receiver]) -> list[RequestStream]:
        pairs = zip(requests, receivers, strict=True)
        return [RequestStream(request, model, receiver, self._finish, self._forget) for request, receiver in pairs]

    def _open_streams(self, model: str, requests: list[EngineCoreRequest], receivers: Sequence[Receiver]) -> list[RequestStream]:
        """Streams that messages from engines are for."""
        streams = self._new_streams(model, requests, receivers)
        now = self._clock()
        for stream in streams:
            stream.heard(now)
            self._streams[stream.handle] = stream
        return streams

    async def _listen_to(self, model: str, streams: Sequence[RequestStream]) -> None:
        await self._bus.run(attach(model, self.incarnation, [(stream.request_id, stream.handle) for stream in streams]))
        payloads = await self._bus.run(records.live_payloads(model, [stream.request_id for stream in streams]))
        for stream, payload in zip(streams, payloads, strict=True):
            stream.listens = stream.enqueued = True
            if payload is not None and not stream.may_enqueue:
                stream.request = msgspec.structs.replace(decode_request(payload), client=self.incarnation, handle=stream.handle)
                stream.may_enqueue = True
        self._repairs.note_gaps([stream.handle for stream in streams])

    async def _take_up(self, stream: RequestStream) -> None:
        """A stream that followed its request listens from now on."""
        self._streams[stream.handle] = stream
        try:
            await self._listen_to(stream.model, [stream])
        except BaseException:
            self._streams.pop(stream.handle, None)
            self._followers.add(stream)
            raise

    def _detached(self, stream: RequestStream) -> None:
        """Another stream listens to its request now."""
        if stream.follows:
            self._streams.pop(stream.handle, None)
            self._followers.add(stream)
        else:
            stream.take_end(FinishReason.ABORT, TAKEN_UP_ELSEWHERE)

    async def abort(self, model: str, request_id: str, timeout: float = 30.0) -> AbortResult:
        """End a request, of any API server, and wait until its engine confirms that its blocks are free. Raises BusUnavailable."""
        return await abort(self._bus, self._replies, model, request_id, timeout, self._clock)

    async def utility(self, engine: EngineInfo, name: str, *arguments: Any, timeout: float = 60.0) -> ControlReply:
        """Run a named call in one engine and wait for its answer. Raises TimeoutError, BusUnavailable."""
        place = (engine.model, engine.slot, engine.incarnation)
        with self._replies.expect() as (token, reply):
            await self._bus.run(control(*place, Utility(name, list(arguments), self.incarnation, token)))
            return await asyncio.wait_for(reply, timeout)

    # Looking

    async def tokenizer_bundle(self, model: ModelHandle) -> TokenizerBundle:
        """The model's tokenizer and chat template, out of Redis. Raises LookupError, BusUnavailable."""
        bundle = await self._bus.run(get_tokenizer(model.name, model.tokenizer))
        if bundle is None:
            raise LookupError(f"The tokenizer of {model.name} is not in Redis.")
        return bundle

    async def record(self, model: str, request_id: str) -> RecordView | None:
        return await self._bus.run(records.record(model, request_id))

    # Housekeeping

    async def _beat(self) -> None:
        """Show that this server lives. A task of its own: maintenance ends the requests of a server whose signs of life stop."""
        while True:
            try:
                await self._bus.run(leases.beat_api(self.incarnation))
            except BusUnavailable:
                pass  # housekeeping tells
            except Exception:
                logger.exception("the heartbeat cannot be sent")
            await asyncio.sleep(BEAT_SECONDS)

    async def _housekeep(self) -> None:
        while True:
            try:
                await self.directory.refresh()
                await self.directory.check_admission()
                await self.directory.take_over_dead_engines()
                await self.directory.expire_late_requests()
            except BusUnavailable as error:
                self.directory.trouble = error.trouble
                logger.warning("%s", error)
            except Exception:  # one model or request caused it; the others go on
                logger.exception("a round of housekeeping broke off")
            await asyncio.sleep(HOUSEKEEPING_SECONDS)

    def _finish(self, stream: RequestStream, choice: int, reason: FinishReason, keep: int, stop_reason: str | None) -> None:
        """A stream ends a choice, or all. When this returns, the command is on its way; it is sent again until Redis has it."""
        if not stream.listens:
            return
        if reason is FinishReason.ABORT and stream.grace:
            self._spawn(self._outlive(stream), self._graces)
        else:
            error = LATE if reason is FinishReason.ERROR else None
            self._errand(self._end(stream, Abort(stream.request_id, choice, reason, keep, stop_reason, error=error)))

    async def _outlive(self, stream: RequestStream) -> None:
        """A request whose client has gone goes on for its grace time, and ends then, unless another stream listens to it."""
        left = await self._run_until_answered(detach(stream.model, stream.request_id, self.incarnation, stream.handle))
        if left is not None and stream.grace < FOREVER:
            await asyncio.sleep(left)
            await self._end(stream, Abort(stream.request_id))

    async def _end(self, stream: RequestStream, command: Abort) -> FinishOutcome:
        asker = Attachment(self.incarnation, stream.handle)
        return await self._run_until_answered(transitions.finish(stream.model, stream.request_id, command, asker=asker))

    async def _run_until_answered(self, call: Call[T]) -> T:
        """Again and again while Redis is away."""
        delay = FIRST_RETRY_SECONDS
        while True:
            try:
                return await self._bus.run(call)
            except BusUnavailable:
                await asyncio.sleep(delay)  # Redis gives no sign of its return
                delay = min(2 * delay, LONGEST_RETRY_SECONDS)

    # Small parts

    def _forget(self, stream: RequestStream) -> None:
        self._streams.pop(stream.handle, None)
        if not stream.listens:
            self._followers.discard(stream)

    def _errand(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start work for one request. Its failure is logged and does not stop the process."""
        self._spawn(work, self._errands)

    def _spawn(self, work: Coroutine[Any, Any, Any], among: set[asyncio.Task[Any]]) -> None:
        task = asyncio.create_task(work)
        among.add(task)
        task.add_done_callback(self._check)
        task.add_done_callback(among.discard)

    def _check(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task of the client died", exc_info=error)
            if self._on_failure is not None and task in self._tasks:
                self._on_failure(error)


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel until all have ended: `asyncio.wait_for` of Python 3.11, in which redis-py waits, can swallow a cancellation that
    comes together with its result."""
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=0.1)
