"""The thread that sends a step's events to Redis: outputs by API server, records of ended requests, replies to commands.

One flush a step, for all of its requests. While Redis is away the queue in front of this thread fills, and then the engine pauses.
When Redis comes back without the last flushes, the thread sends again those that it keeps.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from engine.bus import journals, keys
from engine.bus.call import BusUnavailable, Call
from engine.bus.journals import GAP, EndedRequest, Flushed, OutputPart
from engine.fault_points import reach
from engine.protocol import ControlReply, EngineCoreOutputs, OutputLogprobs, OutputPromptLogprobs, encode, encode_column
from engine.runtime.checkpoints import OpenJournal
from engine.runtime.held_requests import HeldRequest, reason_of
from engine.runtime.owned_requests import OwnedRequest, OwnedRequests
from engine.runtime.reconciliation import Reconciler
from engine.runtime.retries import insist
from engine.runtime.slot_owner import SlotOwner
from engine.scheduling.request import Request
from engine.scheduling.step_outputs import StepOutputs

logger = logging.getLogger(__name__)

MOST_WAITING_EVENTS = 256  # steps of output held while Redis is away
PAUSE_SECONDS = 0.25  # between looks at whether a paused engine was told to stop
KEPT_SECONDS = 5.0  # of flushes, to be sent again: a Redis with AOF loses the last second, a replica that is promoted about as much
KEPT_BYTES = 16 << 20

T = TypeVar("T")


@dataclass
class StepEvents:
    """The events of one step, or of the time between two steps."""

    outputs: StepOutputs | None = None  # its columns
    logprobs: list[tuple[int, OutputLogprobs]] = field(default_factory=list)  # index of the client, what it is told
    prompt_logprobs: list[tuple[int, OutputPromptLogprobs]] = field(default_factory=list)
    started: list[HeldRequest] = field(default_factory=list)  # first token sampled
    ended_choices: list[tuple[HeldRequest, Request]] = field(default_factory=list)
    ended: list[HeldRequest] = field(default_factory=list)  # every choice has ended
    replays: list[tuple[str, EngineCoreOutputs]] = field(default_factory=list)  # client, the output that it lacked
    replies: list[tuple[str, ControlReply]] = field(default_factory=list)  # client, answer
    stored: list[tuple[str, EngineCoreOutputs]] = field(default_factory=list)  # id, the whole output so far, for a checkpoint

    def __bool__(self) -> bool:
        some_tokens = self.outputs is not None and len(self.outputs.handles) > 0
        return some_tokens or any((self.prompt_logprobs, self.ended_choices, self.replays, self.replies, self.stored))


@dataclass(frozen=True)
class KeptFlush:
    """A flush that was sent, in case Redis loses it."""

    number: int
    call: Call[Flushed]
    ended: list[OwnedRequest]  # requests that it ended
    size: int  # bytes
    sent_at: float  # monotonic


class Publisher:
    """The queue of events and the thread that flushes them. `failed` is called with the error that stopped the thread."""

    def __init__(
        self,
        owner: SlotOwner,
        owned: OwnedRequests,
        reconciler: Reconciler,
        clients: list[str],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._owner = owner
        self._owned = owned
        self._reconciler = reconciler
        self._engine = f"{owner.model}:{owner.slot}"
        self._clients = clients  # the loop's table: index -> API server incarnation; only ever appended to
        self._failed = failed
        self._queue: queue.Queue[StepEvents | None] = queue.Queue(MOST_WAITING_EVENTS)
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._num_flushes = 0
        self._kept: deque[KeptFlush] = deque()
        self._kept_size = 0
        self._journal = OpenJournal()
        self.is_blocked = False  # the loop waits in `put`
        self._give_up_at = math.inf  # monotonic
        self._closed = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def put(self, events: StepEvents) -> None:
        """Hand events over; blocks, and so pauses the engine, while too many wait for Redis."""
        self.is_blocked = self._queue.full()
        while True:
            try:
                self._queue.put(events, timeout=PAUSE_SECONDS)
                self.is_blocked = False
                return
            except queue.Full:
                if time.monotonic() >= self._give_up_at:  # lost here; the process that declares this engine dead ends its requests
                    return

    def give_up_at(self, deadline: float) -> None:
        """From `deadline` (monotonic) on the engine must stop rather than wait for Redis."""
        self._give_up_at = deadline

    def close(self, timeout: float) -> None:
        """Flush what waits, for at most `timeout` seconds; the thread ends soon after."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=timeout)
            self._thread.join(timeout)
        self._closed.set()

    def _run(self) -> None:
        try:
            while not self._closed.is_set() and (events := self._queue.get()) is not None:
                self._flush(events)
        except BusUnavailable:  # the engine stops
            pass
        except BaseException as error:
            self._failed(error)
            while self._queue.get() is not None:  # nothing can be flushed any more; never block the loop
                pass

    def _flush(self, events: StepEvents) -> None:
        call, messages, size = self.call_for(events)
        ended = [owned for held in events.ended if (owned := self._owned.get(held.source.request_id)) is not None]
        self._keep(KeptFlush(self._num_flushes, call, ended, size, time.monotonic()))
        self._deliver(call)
        reach("flush-sent")
        self._owned.remove(owned.source.request_id for owned in ended)
        self._journal.add(messages, size)
        clears_some = self._owned.note_output(messages)
        if events.stored:
            self._checkpoint([OutputPart(request_id, encode(output)) for request_id, output in events.stored])
        elif self._journal.is_full or clears_some:
            self._checkpoint(self._journal.take_parts(self._owned))

    def _deliver(self, call: Call[Flushed]) -> None:
        """Returns when Redis has it."""
        flushed = self._insist(call)
        while flushed.outcome == GAP:
            flushed = self._send_again(flushed.last)

    def _send_again(self, last: int) -> Flushed:
        """Redis has flushes up to number `last` alone: it was restarted, rolled back or wiped. What it lost comes again, in order.

        Requests that had ended run in Redis again until their end has come again, and no other comparison may happen meanwhile.
        """
        again = [kept for kept in self._kept if kept.number > last]
        logger.warning("Redis has lost %d flushes of this engine: they are sent again", len(again))
        with self._owned.taking:
            ended = [owned for kept in again for owned in kept.ended]
            insist(lambda: self._reconciler.run(ended), self._closed, "output")
            flushed = Flushed(GAP, last)
            for kept in again:
                flushed = self._insist(journals.flush_behind(kept.call, last))
                if flushed.outcome == GAP:
                    return flushed
                last = kept.number
        self._reconciler.store_outputs()
        return flushed

    def _keep(self, kept: KeptFlush) -> None:
        self._kept.append(kept)
        self._kept_size += kept.size
        while len(self._kept) > 1 and (self._kept_size > KEPT_BYTES or kept.sent_at - self._kept[0].sent_at > KEPT_SECONDS):
            self._kept_size -= self._kept.popleft().size

    def _checkpoint(self, parts: list[OutputPart]) -> None:
        owner = self._owner
        self._insist(journals.checkpoint(owner.model, owner.slot, owner.incarnation, parts, self._num_flushes))
        reach("checkpointed")

    def _insist(self, call: Call[T]) -> T:
        """Raises BusUnavailable when the engine stops before Redis answers."""
        return insist(lambda: self._owner.run(call), self._closed, "output")

    def call_for(self, events: StepEvents) -> tuple[Call[Flushed], list[tuple[str, EngineCoreOutputs]], int]:
        """The flush of events, under the next number; the messages that it journals, and their size in bytes."""
        self._num_flushes += 1
        messages = self._messages(events)
        payloads = [(client, encode(message)) for client, message in messages]
        call = journals.flush(
            self._owner.model,
            self._owner.slot,
            self._owner.incarnation,
            self._num_flushes - 1,
            self._num_flushes,
            messages=payloads,
            started=[(held.source.request_id, _started_fields(held)) for held in events.started],
            ended=[_ended_request(held) for held in events.ended],
            notices=self._notices(events),
        )
        return call, messages, sum(len(payload) for _, payload in payloads)

    def _messages(self, events: StepEvents) -> list[tuple[str, EngineCoreOutputs]]:
        """(API server, its message)."""
        by_client: dict[int, EngineCoreOutputs] = {}
        if events.outputs is not None:
            self._add_columns(events.outputs, by_client)
        for client, told in events.logprobs:
            self._of(by_client, client).logprobs.append(told)
        for client, prompt_told in events.prompt_logprobs:
            self._of(by_client, client).prompt_logprobs.append(prompt_told)
        for held, request in events.ended_choices:
            self._of(by_client, request.client).finished.append(held.finished_output(request))
        return [(self._clients[client], message) for client, message in by_client.items()]

    def _notices(self, events: StepEvents) -> list[tuple[str, bytes]]:
        """What the journal need not hold: replies, and output that it holds already."""
        for _, replay in events.replays:
            replay.engine, replay.incarnation, replay.flush_number = self._engine, self._owner.incarnation, self._num_flushes
        return [(keys.client_channel(client), encode(message)) for client, message in (*events.replies, *events.replays)]

    def _add_columns(self, outputs: StepOutputs, by_client: dict[int, EngineCoreOutputs]) -> None:
        counts = np.bincount(outputs.clients)
        for client in counts.nonzero()[0].tolist():
            theirs = slice(None) if counts[client] == len(outputs.clients) else outputs.clients == client
            message = self._of(by_client, client)
            message.handles = encode_column(outputs.handles[theirs], np.int64)
            message.choices = encode_column(outputs.choices[theirs])
            message.offsets = encode_column(outputs.offsets[theirs])
            message.token_ids = encode_column(outputs.token_ids[theirs])

    def _of(self, by_client: dict[int, EngineCoreOutputs], client: int) -> EngineCoreOutputs:
        if client not in by_client:
            by_client[client] = EngineCoreOutputs(
                self._engine, self._owner.incarnation, self._num_flushes, logprobs=[], prompt_logprobs=[], finished=[]
            )
        return by_client[client]


def _started_fields(held: HeldRequest) -> dict[str, str]:
    first = held.choices[0]
    return {
        "scheduled": f"{first.times.scheduled:.6f}",
        "first_token": f"{first.times.first_token:.6f}",
        "cached_tokens": str(first.num_cached_tokens),
    }


def _ended_request(held: HeldRequest) -> EndedRequest:
    """The request as a whole ended as the worst of its choices did."""
    worst = max(held.choices, key=lambda request: int(request.finish_reason or 0))
    times = [request.times for request in held.choices]
    started = [each for each in times if each.first_token]
    fields = {"preemptions": str(sum(each.num_preemptions for each in times))}
    if scheduled := [each.scheduled for each in times if each.scheduled]:
        fields["scheduled"] = f"{min(scheduled):.6f}"
    if started:
        fields["first_token"] = f"{min(each.first_token for each in started):.6f}"
        fields["last_token"] = f"{max(each.last_token for each in started):.6f}"
    return EndedRequest(
        request_id=held.source.request_id,
        reason=reason_of(worst),
        output=encode(held.stored_output()),
        output_tokens=sum(request.num_output_tokens for request in held.choices),
        cached_tokens=held.choices[0].num_cached_tokens,
        error=worst.error,
        fields=fields,
    )
