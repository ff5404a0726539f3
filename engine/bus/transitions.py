"""The ledger's calls by which requests come to an engine and end: one script each, all or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.bus import keys
from engine.bus.attachments import Attachment
from engine.bus.call import Call, milliseconds, script
from engine.bus.control import COMMANDS_KEPT, CONTROL_TTL
from engine.bus.records import RecordView, parse_fields, parse_record
from engine.protocol import LATE_IN_QUEUE, READ_VERSIONS, Abort, FinishReason, RequestTimes, decode_control, encode

TOMBSTONE_TTL = 600.0  # seconds that an abort waits for a request that it overtook
SHARE_TTL = 1.0  # seconds that an engine's share of what waits is kept for it after it last asked
SUSPECT_DEATHS = 2  # of engines in a row, after which a request runs beside no other such
UNBOUNDED = 2**53


class Taken(NamedTuple):
    entry: str  # id in the requests stream
    payload: bytes  # EngineCoreRequest
    enqueued: float  # epoch seconds by Redis' clock, as is `taken`
    taken: float
    client: str  # the API server that it is attached to now, and that server's handle
    handle: int
    priority: int  # which `headrace priority` may have changed
    orphan: Orphan | None = None


@dataclass(frozen=True)
class Orphan:
    """What Redis knows of a request whose engine died."""

    attachments: frozenset[tuple[str, int]]  # (API server, handle), the present one and those before: outputs bear one of them
    journals: tuple[str, ...]  # names of the journals that may hold output of it
    orders: tuple[Abort, ...]  # ends that no engine has obeyed
    attempts: int  # engines that died with it, one after the other
    cached_tokens: int  # prompt tokens that the prefix cache of its first engine answered
    times: RequestTimes  # of its first engine, as far as known


def take(
    model: str,
    slot: str,
    incarnation: int,
    fingerprint: str,
    number: int,
    count: int,
    places: int,
    room: int = UNBOUNDED,
    may_suspect: bool = True,
    version: int = READ_VERSIONS[-1],
) -> Call[list[Taken]]:
    """Requests that wait, of `count` choices at most (the last one may have more), by priority, then by fair shares of their
    tenants, then by arrival; they are the slot's from now on. Raises Fenced, Unowned.

    Orphans of the fingerprint come first; of those that engines died of, one at most, and only where the engine has none
    (`may_suspect`). Of all others no more than a fair share, where others take too: engines of the model that asked within
    SHARE_TTL come to have equal numbers of choices in flight, but for those that can run no more. `places`: how many more choices
    this one could run; 0 leaves all to the others. `room`: tokens that its KV cache has blocks for.
    `version`: the newest of the protocol that the caller reads. It leaves newer requests in the queue and takes those behind them.

    `number` rises with each call of an incarnation. A caller that got BusUnavailable runs the same Call again: it may own requests
    already, and gets the same ones.
    """
    return Call(
        lambda answer: [_taken(each) for each in answer],
        script=script("take", "ledger", "takers", "vessels"),
        keys=(
            *keys.ledger(model),
            keys.owner(model, slot),
            keys.progress(model, slot),
            keys.shares(model),
            keys.asked(model),
            keys.slot(model),
        ),
        arguments=(
            slot,
            incarnation,
            fingerprint,
            count,
            number,
            keys.consumer(),
            places,
            milliseconds(SHARE_TTL),
            int(may_suspect),
            room,
            int(FinishReason.ERROR),
            keys.client_channel(),
            LATE_IN_QUEUE,
            version,
            keys.wake_channel(model),
            SUSPECT_DEATHS,
        ),
    )


def _taken(answer: Sequence[Any]) -> Taken:
    entry, payload, enqueued, taken, client, handle, priority = answer[:7]
    orphan = None
    if len(answer) > 7:
        attachments, journals, orders, attempts, cached_tokens, scheduled, first_token = answer[7:]
        pairs = (pair.rpartition(":") for pair in attachments.decode().split())
        orphan = Orphan(
            frozenset((name, int(number)) for name, _, number in pairs),
            tuple(journals.decode().split()),
            tuple(command for command in map(decode_control, orders) if isinstance(command, Abort)),
            int(attempts),
            int(cached_tokens),
            RequestTimes(float(enqueued), float(taken), float(scheduled), float(first_token)),
        )
    return Taken(entry.decode(), payload, float(enqueued), float(taken), client.decode(), int(handle or 0), int(priority), orphan)


def reject(model: str, slot: str, incarnation: int, entry: str, error: str) -> Call[bool]:
    """End, with an error, a taken entry that its engine cannot read or run; False: it was not this incarnation's. Raises Fenced,
    Unowned."""
    arguments = (
        incarnation,
        entry,
        int(FinishReason.ERROR),
        error,
        keys.client_channel(),
    )
    return Call(bool, script("reject", "ledger"), (*keys.ledger(model), keys.owner(model, slot)), arguments)


@dataclass(frozen=True)
class FinishOutcome:
    """`state` before the call: "queued" (it is ended now), "running" (its engine was told and answers), "ended" or "unknown"; or
    "detached": the stream that asked does not listen to it any more, and nothing happened."""

    state: str
    record: RecordView | None


def finish(
    model: str, request_id: str, command: Abort, error: str | None = None, asker: Attachment | None = None
) -> Call[FinishOutcome]:
    """End a request in any state. An unknown id leaves a tombstone, so that the request is refused when it comes late.

    `asker`: the stream that wants the end. It counts only while that is the one that listens.

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
        asker.client if asker is not None else "",
        asker.handle if asker is not None else 0,
    )

    def decode(answer: list[Any]) -> FinishOutcome:
        return FinishOutcome(answer[0].decode(), parse_record(parse_fields(answer[1])))

    return Call(decode, script("finish", "ledger", "commands"), (*keys.ledger(model), keys.control(model)), arguments)
