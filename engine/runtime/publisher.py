"""The thread that sends a step's events to Redis: outputs by API server, records of ended requests, replies to commands.

One flush a step, for all of its requests. While Redis is away the queue in front of this thread fills, and then the engine pauses.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from engine.bus import keys, transitions
from engine.bus.call import BusUnavailable, Call
from engine.bus.connection import Bus
from engine.bus.transitions import EndedRequest
from engine.protocol import ControlReply, EngineCoreOutputs, OutputLogprobs, OutputPromptLogprobs, encode, encode_column
from engine.runtime.held_requests import HeldRequest, reason_of
from engine.scheduling.request import Request
from engine.scheduling.step_outputs import StepOutputs

logger = logging.getLogger(__name__)

MOST_WAITING_EVENTS = 256  # steps of output held while Redis is away
PAUSE_SECONDS = 0.25  # between looks at whether a paused engine was told to stop


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

    def __bool__(self) -> bool:
        some_tokens = self.outputs is not None and len(self.outputs.handles) > 0
        return some_tokens or any((self.prompt_logprobs, self.ended_choices, self.replays, self.replies))


class Publisher:
    """The queue of events and the thread that flushes them. `failed` is called with the error that stopped the thread."""

    def __init__(
        self,
        bus: Bus,
        model: str,
        slot: str,
        incarnation: int,
        clients: list[str],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._bus = bus
        self._model, self._slot, self._incarnation = model, slot, incarnation
        self._engine = f"{model}:{slot}"
        self._clients = clients  # the loop's table: index -> API server incarnation; only ever appended to
        self._failed = failed
        self._queue: queue.Queue[StepEvents | None] = queue.Queue(MOST_WAITING_EVENTS)
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._num_flushes = 0
        self._give_up_at = math.inf  # monotonic
        self._is_closed = False

    def start(self) -> None:
        self._thread.start()

    def put(self, events: StepEvents) -> None:
        """Hand events over; blocks, and so pauses the engine, while too many wait for Redis."""
        while True:
            try:
                self._queue.put(events, timeout=PAUSE_SECONDS)
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
        self._is_closed = True

    def _run(self) -> None:
        try:
            while not self._is_closed and (events := self._queue.get()) is not None:
                self._flush(events)
        except BaseException as error:
            self._failed(error)
            while self._queue.get() is not None:  # nothing can be flushed any more; never block the loop
                pass

    def _flush(self, events: StepEvents) -> None:
        call = self.call_for(events)
        delay = 0.02
        while True:
            try:
                self._bus.run(call)
                return
            except BusUnavailable as error:
                if self._is_closed:
                    return
                logger.warning("output waits for Redis: %s", error)
                time.sleep(delay)  # Redis gives no sign of its return
                delay = min(2 * delay, 1.0)

    def call_for(self, events: StepEvents) -> Call[int]:
        """The flush of events, under the next number."""
        self._num_flushes += 1
        return transitions.flush(
            self._model,
            self._slot,
            self._incarnation,
            self._num_flushes,
            messages=self._messages(events),
            started=[(held.source.request_id, _started_fields(held)) for held in events.started],
            ended=[_ended_request(held) for held in events.ended],
            notices=self._notices(events),
        )

    def _messages(self, events: StepEvents) -> list[tuple[str, bytes]]:
        by_client: dict[int, EngineCoreOutputs] = {}
        if events.outputs is not None:
            self._add_columns(events.outputs, by_client)
        for client, told in events.logprobs:
            self._of(by_client, client).logprobs.append(told)
        for client, prompt_told in events.prompt_logprobs:
            self._of(by_client, client).prompt_logprobs.append(prompt_told)
        for held, request in events.ended_choices:
            self._of(by_client, request.client).finished.append(held.finished_output(request))
        return [(self._clients[client], encode(message)) for client, message in by_client.items()]

    def _notices(self, events: StepEvents) -> list[tuple[str, bytes]]:
        """What the journal need not hold: replies, and output that it holds already."""
        for _, replay in events.replays:
            replay.engine, replay.incarnation, replay.flush_number = self._engine, self._incarnation, self._num_flushes
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
                self._engine, self._incarnation, self._num_flushes, logprobs=[], prompt_logprobs=[], finished=[]
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
