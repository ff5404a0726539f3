"""The ledger's calls: an engine takes requests, publishes their outputs, ends them. One script each, all or nothing."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.bus import keys
from engine.bus.call import Argument, Call, flat, milliseconds, script
from engine.bus.control import COMMANDS_KEPT, CONTROL_TTL
from engine.bus.records import RecordView, parse_fields, parse_record
from engine.protocol import Abort, FinishReason, encode

TOMBSTONE_TTL = 600.0  # seconds that an abort waits for a request that it overtook
JOURNAL_ENTRIES = 4096  # kept of an engine's journal, about
JOURNAL_TTL = 600.0  # seconds that a journal outlives its engine
SHARE_TTL = 1.0  # seconds that an engine's share of what waits is kept for it after it last asked
ENGINE_DIED = "The engine that ran this request died."
FAIL_BATCH = 128  # pending entries looked at in one script: Redis answers no other client meanwhile


class Taken(NamedTuple):
    entry: str  # id in the requests stream
    payload: bytes  # EngineCoreRequest
    enqueued: float  # epoch seconds by Redis' clock, as is `taken`
    taken: float


def take(model: str, slot: str, incarnation: int, count: int, places: int) -> Call[list[Taken]]:
    """At most `count` of the requests that wait, by priority, then arrival; they are the slot's from now on. Raises Fenced.

    No more than a fair share where others take too: engines of the model that asked within SHARE_TTL come to have equal numbers in
    flight, but for those that can run no more. `places`: how many more this one could run; 0 leaves all to the others.

    The call carries a nonce: run again after an answer was lost, the same Call gives the same requests. A caller that got
    BusUnavailable runs the same Call again: it may own requests already.
    """
    return Call(
        lambda answer: [Taken(each[0].decode(), each[1], float(each[2]), float(each[3])) for each in answer],
        script=script("take", "ledger"),
        keys=(*keys.ledger(model), keys.slot(model, slot), keys.taken(model, slot), keys.shares(model), keys.slot(model)),
        arguments=(
            slot,
            incarnation,
            count,
            secrets.token_hex(8),
            keys.consumer(),
            places,
            milliseconds(SHARE_TTL),
        ),
    )


def reject(model: str, slot: str, incarnation: int, entry: str, error: str) -> Call[bool]:
    """End, with an error, a taken entry that its engine cannot read or run; False: it was not this incarnation's. Raises Fenced."""
    arguments = (
        incarnation,
        entry,
        int(FinishReason.ERROR),
        error,
        keys.client_channel(),
    )
    return Call(bool, script("reject", "ledger"), (*keys.ledger(model), keys.slot(model, slot)), arguments)


@dataclass(frozen=True)
class EndedRequest:
    """One request (all its choices) that its engine ended."""

    request_id: str
    reason: FinishReason  # of the request as a whole
    output: bytes  # StoredOutput
    output_tokens: int  # summed over choices
    cached_tokens: int = 0
    error: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)  # further ones of the record: scheduled, first_token, ...


def flush(
    model: str,
    slot: str,
    incarnation: int,
    flush_number: int,
    messages: Sequence[tuple[str, bytes]] = (),
    started: Sequence[tuple[str, Mapping[str, str]]] = (),
    ended: Sequence[EndedRequest] = (),
    notices: Sequence[tuple[str, bytes]] = (),
) -> Call[int]:
    """A step's outputs, at once: journal entry, publications, records. 1: done; 0: this flush was done before. Raises Fenced.

    `flush_number` rises with each flush of an incarnation: one that is not higher than the last is taken for a resend.
    `messages`: (API server incarnation, ClientMessage bytes), one each. `started`: record fields of running requests.
    `notices`: (channel, ControlReply bytes).
    """
    arguments: list[Argument] = [
        incarnation,
        flush_number,
        JOURNAL_ENTRIES,
        milliseconds(JOURNAL_TTL),
        keys.client_channel(),
        len(messages),
        len(started),
        len(ended),
        len(notices),
    ]
    for client, payload in messages:
        arguments += [client, payload]
    for request_id, fields in started:
        arguments += [request_id, *flat(fields)]
    for request in ended:
        arguments += [request.request_id, *flat(_last_fields(request))]
    for channel, payload in notices:
        arguments += [channel, payload]
    return Call(
        int,
        script=script("flush", "ledger"),
        keys=(*keys.ledger(model), keys.slot(model, slot), keys.journal(model, slot, incarnation)),
        arguments=tuple(arguments),
    )


def _last_fields(request: EndedRequest) -> dict[str, Argument]:
    """The record's fields at the end of a request."""
    error: dict[str, Argument] = {} if request.error is None else {"error": request.error}
    return {
        "reason": str(request.reason),
        "output_tokens": request.output_tokens,
        "cached_tokens": request.cached_tokens,
        "output": request.output,
        **request.fields,
        **error,
    }


@dataclass(frozen=True)
class FinishOutcome:
    """`state` before the call: "queued" (it is ended now), "running" (its engine was told and answers), "ended" or "unknown"."""

    state: str
    record: RecordView | None


def finish(model: str, request_id: str, command: Abort, error: str | None = None) -> Call[FinishOutcome]:
    """End a request in any state. An unknown id leaves a tombstone, so that the request is refused when it comes late.

    With a choice (>= 0) of a request of several choices that still waits, nothing happens: what has no output needs no stop.
    """
    arguments = (
        request_id,
        int(command.reason),
        str(command.reason),
        error or "",
        command.choice,
        encode(command),
        milliseconds(TOMBSTONE_TTL),
        COMMANDS_KEPT,
        milliseconds(CONTROL_TTL),
        keys.client_channel(),
        keys.control_channel(model),
    )

    def decode(answer: list[Any]) -> FinishOutcome:
        return FinishOutcome(answer[0].decode(), parse_record(parse_fields(answer[1])))

    return Call(decode, script("finish", "ledger"), (*keys.ledger(model), keys.control(model)), arguments)


def fail_engine(model: str, slot: str, incarnation: int, error: str = ENGINE_DIED) -> Call[int]:
    """End the requests that the slot's engines up to `incarnation` had in flight, with an error. Returns how many.

    Refuses (0) while one of these incarnations holds the slot: a supervisor that saw the process exit releases its slot first.
    Bounded batches follow one another.
    """

    def batch(start: str, failed: int) -> Call[int]:
        def decode(answer: list[Any]) -> int | Call[int]:
            done = failed + int(answer[0])
            return batch(answer[1].decode(), done) if answer[1] else done

        arguments = (
            incarnation,
            int(FinishReason.ERROR),
            error,
            FAIL_BATCH,
            start,
            keys.consumer(slot),
            keys.client_channel(),
        )
        return Call(decode, script("fail_engine", "ledger"), (*keys.ledger(model), keys.slot(model, slot)), arguments)

    return batch("-", 0)
