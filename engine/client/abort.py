"""Ending a request by its id, which is answered when the request is over and its blocks are free."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.bus import records, transitions
from engine.bus.connection import AsyncBus
from engine.bus.records import RecordView
from engine.protocol import Abort, ControlReply

LOOK_SECONDS = 0.5  # between looks at the record of a request whose engine has not answered: it may have died


@dataclass(frozen=True)
class AbortResult:
    before: str  # "queued" | "running" | "ended" | "unknown"
    state: str  # "ended": over, and its blocks are free; "unconfirmed": its engine did not answer in time; "unknown": not found
    num_tokens: int = 0
    record: RecordView | None = None

    @property
    def found(self) -> bool:
        return self.state != "unknown"


class Replies:
    """Answers of engines on the channel of one process that asks. An answer bears the token of its command."""

    def __init__(self, asker: str) -> None:
        self.asker = asker  # as in `EngineCoreRequest.client`
        self._awaited: dict[str, asyncio.Future[ControlReply]] = {}

    @contextmanager
    def expect(self) -> Iterator[tuple[str, asyncio.Future[ControlReply]]]:
        """A token for a command, and the answer to it."""
        token = secrets.token_hex(8)
        self._awaited[token] = reply = asyncio.get_running_loop().create_future()
        try:
            yield token, reply
        finally:
            del self._awaited[token]

    def take(self, reply: ControlReply) -> None:
        """A reply whose command is not awaited any more is dropped."""
        awaited = self._awaited.get(reply.token)
        if awaited is not None and not awaited.done():
            awaited.set_result(reply)


async def abort(
    bus: AsyncBus,
    replies: Replies,
    model: str,
    request_id: str,
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
) -> AbortResult:
    """End a request, of any client, and wait at most `timeout` seconds for its engine. Raises BusUnavailable."""
    with replies.expect() as (token, reply):
        command = Abort(request_id, reply_to=replies.asker, token=token)
        before = (await bus.run(transitions.finish(model, request_id, command))).state
        if before == "running":
            record = await _ended_record(bus, model, request_id, reply, clock() + timeout, clock)
        else:
            record = await bus.run(records.record(model, request_id))
    if before == "unknown":
        return AbortResult(before, "unknown")
    if record is not None and record.state != "ended":
        return AbortResult(before, "unconfirmed", record=record)
    return AbortResult(before, "ended", record.output_tokens if record else 0, record)


async def _ended_record(
    bus: AsyncBus,
    model: str,
    request_id: str,
    reply: asyncio.Future[ControlReply],
    deadline: float,
    clock: Callable[[], float],
) -> RecordView | None:
    """The record once the request has ended, or as it is at the deadline. None: it is gone.

    The engine's reply says when to look. It may not come: then the engine died, and others end its requests.
    """
    while True:
        pause = min(LOOK_SECONDS, deadline - clock())
        if reply.done():  # but the request has not ended: the engine read the abort first, and ends the request when it comes
            await asyncio.sleep(pause)
        else:
            await asyncio.wait({reply}, timeout=pause)
        record = await bus.run(records.record(model, request_id))
        if record is None or record.state == "ended" or clock() >= deadline:
            return record
