"""Looks at requests and engines through Redis, and ends requests: what `headrace ps`, `inspect`, `abort` and `engines` do."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from redis.exceptions import RedisError

from engine.bus import keys, leases, queue_place, records
from engine.bus.call import BusUnavailable, UnfitRedis
from engine.bus.connection import AsyncBus, Bus
from engine.bus.records import RecordView
from engine.bus.subscription import AsyncSubscription
from engine.client.abort import AbortResult, Replies
from engine.client.abort import abort as abort_by_id
from engine.client.admission import estimated_wait
from engine.protocol import ControlReply, EngineInfo, decode_client_message
from ops.errors import CommandError, SettingError
from ops.settings import shown

# marks on a request's way, and its state until the next one
MARKS = (
    ("enqueued", "waits in Redis"),
    ("received", "waits in the engine"),
    ("scheduled", "prompt is computed"),
    ("first_token", "output is computed"),
    ("last_token", "ends"),
    ("finished", ""),
)


@dataclass(frozen=True)
class Request:
    """A request's record, and the canonical name of the model under which Redis has it."""

    model: str
    record: RecordView
    num_before: int | None = None  # requests that wait before it; None: it does not wait, or that was not asked
    estimated_wait: float | None = None  # seconds

    def json(self) -> dict[str, Any]:
        facts: dict[str, Any] = msgspec.to_builtins(self.record)
        queue = {"queue_position": self.num_before, "estimated_wait": self.estimated_wait}
        return {**facts, **queue, "model": self.model, "requested_model": self.record.model, "timeline": timeline(self.record)}


@dataclass(frozen=True)
class Aborted:
    """The outcome of an abort."""

    id: str
    state: str  # "ended": over, its blocks are free; "already ended"; "unconfirmed": no answer came in time
    output_tokens: int = 0

    @classmethod
    def of(cls, request: Request, result: AbortResult) -> Aborted:
        if result.before in ("ended", "unknown"):
            return cls(request.record.id, "already ended", request.record.output_tokens)
        return cls(request.record.id, result.state, result.num_tokens)

    @property
    def is_over(self) -> bool:
        return self.state != "unconfirmed"


@contextmanager
def connect(redis_url: str) -> Iterator[Bus]:
    """A bus whose failures are one line. Raises CommandError."""
    try:
        with Bus(redis_url, patience=2.0) as bus:
            bus.run(leases.check_server())
            yield bus
    except UnfitRedis as error:
        raise SettingError(f"cannot use Redis at {shown('redis_url', redis_url)}: {error}") from None
    except (BusUnavailable, RedisError) as error:
        raise CommandError(f"cannot use Redis at {shown('redis_url', redis_url)}: {error}") from None


def models(bus: Bus, model: str | None) -> list[str]:
    """Every model that Redis knows, or the one named, by any of its names. Raises CommandError."""
    known = bus.run(leases.models())
    if model is None or model in known:
        return known if model is None else [model]
    for name in known:
        if any(model in info.served_names for info in bus.run(leases.engines(name))):
            return [name]
    raise CommandError(f"there is no model `{model}`; Redis knows {', '.join(known) or 'none'}")


def engines(bus: Bus, model: str | None) -> list[EngineInfo]:
    return [info for name in models(bus, model) for info in bus.run(leases.engines(name))]


def live(bus: Bus, model: str | None) -> list[Request]:
    """Requests that wait or run, newest first."""
    found = [Request(name, record) for name in models(bus, model) for record in bus.run(records.live_requests(name))]
    return sorted(found, key=lambda request: -request.record.enqueued)


def ended(bus: Bus, model: str | None) -> list[Request]:
    """Ended requests whose records are kept, last ended first."""
    found = [Request(name, record) for name in models(bus, model) for record in bus.run(records.ended_requests(name))]
    return sorted(found, key=lambda request: -request.record.finished)


def find(bus: Bus, request_id: str, model: str | None) -> list[Request]:
    """Requests under a client's id, an answer's or an internal one, newest first. Raises CommandError where there is none."""
    found = [Request(*each) for each in bus.run(records.look_up(models(bus, model), request_id))]
    if not found:
        raise CommandError(f"there is no request `{request_id}`; records of ended requests are kept for --record-retention seconds")
    return found


def with_place(bus: Bus, request: Request) -> Request:
    """The request with its place in the queue, if it waits."""
    if request.record.state != "queued":
        return request
    (number,) = bus.run(queue_place.num_before(request.model, [request.record.entry]))
    wait = None if number is None else estimated_wait(number, bus.run(leases.engines(request.model)))
    return replace(request, num_before=number, estimated_wait=wait)


def prioritize(bus: Bus, request_id: str, priority: int, model: str | None) -> list[tuple[Request, bool]]:
    """Give the requests with this id that wait another priority: each that lives, and whether it still waited."""
    found = [request for request in find(bus, request_id, model) if request.record.state != "ended"]
    return [(each, bus.run(queue_place.prioritize(each.model, each.record.id, priority)) == "queued") for each in found]


def to_abort(bus: Bus, request_ids: Sequence[str], model: str | None) -> list[Request]:
    """All live requests of each id, or the newest one of an id that has none."""
    chosen: dict[str, Request] = {}
    for request_id in request_ids:
        found = find(bus, request_id, model)
        for request in [request for request in found if request.record.state != "ended"] or found[:1]:
            chosen[request.record.id] = request
    return list(chosen.values())


def abort(bus: Bus, requests: Sequence[Request], timeout: float) -> list[Aborted]:
    """End the requests and wait, at most `timeout` seconds in all, until each is over and its blocks are free."""
    return asyncio.run(_abort_all(bus, requests, timeout))


async def _abort_all(bus: Bus, requests: Sequence[Request], timeout: float) -> list[Aborted]:
    replies = Replies(f"cli-{secrets.token_hex(8)}")
    async with (
        AsyncBus(bus.url, patience=bus.patience) as own_bus,
        own_bus.subscribe(keys.client_channel(replies.asker)) as subscription,
    ):
        listening = asyncio.create_task(_listen(subscription, replies))
        try:
            aborts = (abort_by_id(own_bus, replies, request.model, request.record.id, timeout) for request in requests)
            return [Aborted.of(*pair) for pair in zip(requests, await asyncio.gather(*aborts), strict=True)]
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


async def _listen(subscription: AsyncSubscription, replies: Replies) -> None:
    """Replies are hints: without this task aborts are still seen in the records."""
    while True:
        heard = await subscription.get()
        if heard is not None and isinstance(message := decode_client_message(heard[1]), ControlReply):
            replies.take(message)


def timeline(record: RecordView) -> list[dict[str, Any]]:
    """The marks that the request has passed: name, epoch seconds, what it did next and for how long (seconds; None: goes on)."""
    passed = [(name, getattr(record, name), meaning) for name, meaning in MARKS if getattr(record, name) > 0]
    rows: list[dict[str, Any]] = []
    for index, (name, at, meaning) in enumerate(passed):
        following = passed[index + 1][1] if index + 1 < len(passed) else None
        rows.append({"mark": name, "time": at, "then": meaning, "seconds": None if following is None else max(0.0, following - at)})
    return rows
