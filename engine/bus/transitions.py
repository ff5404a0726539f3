"""The ledger's calls: an engine takes requests, publishes their outputs, ends them. One script each, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from engine.bus import keys
from engine.bus.attachments import Attachment
from engine.bus.call import Argument, Call, flat, milliseconds, script
from engine.bus.control import COMMANDS_KEPT, CONTROL_TTL
from engine.bus.records import RecordView, parse_fields, parse_record
from engine.fault_points import reach
from engine.protocol import LATE_IN_QUEUE, Abort, FinishReason, RequestTimes, decode_control, encode

TOMBSTONE_TTL = 600.0  # seconds that an abort waits for a request that it overtook
JOURNAL_TTL = 3600.0  # seconds that a journal outlives its engine
SHARE_TTL = 1.0  # seconds that an engine's share of what waits is kept for it after it last asked
UNBOUNDED = 2**53
TAKEOVER_BATCH = 128  # pending entries looked at in one script: Redis answers no other client meanwhile
KEPT_BYTES = 256 << 20  # of the outputs in the records of ended requests; then the oldest go


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
) -> Call[list[Taken]]:
    """Requests that wait, of `count` choices at most (the last one may have more), by priority, then by fair shares of their
    tenants, then by arrival; they are the slot's from now on. Raises Fenced, Unowned.

    Orphans of the fingerprint come first; of those that engines died of, one at most, and only where the engine has none
    (`may_suspect`). Of all others no more than a fair share, where others take too: engines of the model that asked within
    SHARE_TTL come to have equal numbers of choices in flight, but for those that can run no more. `places`: how many more choices
    this one could run; 0 leaves all to the others. `room`: tokens that its KV cache has blocks for.

    `number` rises with each call of an incarnation. A caller that got BusUnavailable runs the same Call again: it may own requests
    already, and gets the same ones.
    """
    return Call(
        lambda answer: [_taken(each) for each in answer],
        script=script("take", "ledger"),
        keys=(
            *keys.ledger(model),
            keys.owner(model, slot),
            keys.progress(model, slot),
            keys.shares(model),
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
class EndedRequest:
    """One request (all its choices) that its engine ended."""

    request_id: str
    reason: FinishReason  # of the request as a whole
    output: bytes  # StoredOutput
    output_tokens: int  # summed over choices
    cached_tokens: int = 0
    error: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)  # further ones of the record: scheduled, first_token, ...


class Flushed(NamedTuple):
    outcome: int  # FLUSHED, REPEATED: it was done before, or GAP: earlier ones are missing in Redis, and nothing was done
    last: int  # number of the last flush that Redis has


FLUSHED, REPEATED, GAP = 1, 0, -1


def flush(
    model: str,
    slot: str,
    incarnation: int,
    previous: int,
    number: int,
    messages: Sequence[tuple[str, bytes]] = (),
    started: Sequence[tuple[str, Mapping[str, str]]] = (),
    ended: Sequence[EndedRequest] = (),
    notices: Sequence[tuple[str, bytes]] = (),
    kept_bytes: int = KEPT_BYTES,
) -> Call[Flushed]:
    """A step's outputs, at once: journal entry, publications, records. Raises Fenced, Unowned.

    `number` rises with each flush of an incarnation, and `previous` is that of the flush before: so a flush that is sent twice
    counts once, and one that Redis lost is noticed. `messages`: (API server incarnation, ClientMessage bytes), one each. `started`:
    record fields of running requests. `notices`: (channel, ClientMessage bytes), published and not journaled.
    """
    arguments: list[Argument] = [
        incarnation,
        previous,
        number,
        milliseconds(JOURNAL_TTL),
        keys.client_channel(),
        kept_bytes,
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
        lambda answer: Flushed(*map(int, answer)),
        script=script("flush", "ledger"),
        keys=(
            *keys.ledger(model),
            keys.owner(model, slot),
            keys.progress(model, slot),
            keys.journal(model, f"{slot}:{incarnation}"),
        ),
        arguments=tuple(arguments),
    )


def flush_behind(call: Call[Flushed], last: int) -> Call[Flushed]:
    """The same flush as the next one behind number `last`, which is all that Redis has."""
    incarnation, _, *others = call.arguments
    return replace(call, arguments=(incarnation, last, *others))


@dataclass(frozen=True)
class OutputPart:
    """Output of one running request, for `checkpoint`."""

    request_id: str
    output: bytes  # EngineCoreOutputs of this request alone
    remark: Literal["", "adopt", "well"] = ""  # adopt: it was taken over, and this is all its earlier output; well: it made so much
    # output since it was taken that it is not why engines die


def checkpoint(model: str, slot: str, incarnation: int, parts: Sequence[OutputPart], flushed: int = 0) -> Call[int]:
    """Store outputs apart from the journal, which is cut up to flush number `flushed`. Returns how many of the requests run here.

    Raises Fenced, Unowned.
    """
    arguments: list[Argument] = [incarnation, slot, flushed, len(parts)]
    for part in parts:
        arguments += [part.request_id, part.remark, part.output]
    return Call(
        int,
        script("checkpoint", "ledger"),
        (*keys.ledger(model), keys.owner(model, slot), keys.journal(model, f"{slot}:{incarnation}")),
        tuple(arguments),
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

    return Call(decode, script("finish", "ledger"), (*keys.ledger(model), keys.control(model)), arguments)


class TakenOver(NamedTuple):
    orphaned: int  # requests that wait for the next engine
    ended: int  # requests that ended with an error, because engine after engine died of them


def takeover(model: str, slot: str, incarnation: int, *, sure: bool = False, blame: bool = True) -> Call[TakenOver]:
    """The requests that the slot's engines up to `incarnation` had in flight wait for the next engine of their fingerprint.

    Nothing happens while the engine's heartbeat is there, unless `sure`: its process was seen to end, or it asks itself. `blame`: a
    request counts it as a death that it may have caused. Bounded batches follow one another.
    """

    def batch(start: str, so_far: TakenOver) -> Call[TakenOver]:
        def decode(answer: list[Any]) -> TakenOver | Call[TakenOver]:
            reach("taking-over")
            done = TakenOver(so_far.orphaned + int(answer[0]), so_far.ended + int(answer[1]))
            return batch(answer[2].decode(), done) if answer[2] else done

        arguments = (
            incarnation,
            int(sure),
            int(blame),
            TAKEOVER_BATCH,
            start,
            keys.consumer(slot),
            int(FinishReason.ERROR),
            keys.client_channel(),
        )
        own_keys = (keys.owner(model, slot), keys.slot(model, slot), keys.slot_info(model, slot), keys.incarnation(model))
        return Call(decode, script("takeover", "ledger", "incarnation"), (*keys.ledger(model), *own_keys), arguments)

    return batch("-", TakenOver(0, 0))


def expire_orphans(model: str, failover_timeout: float, most: int = TAKEOVER_BATCH) -> Call[int]:
    """End requests that waited for an engine to continue them for longer than the failover time. Returns how many, `most` at
    most."""
    arguments = (milliseconds(failover_timeout), most, int(FinishReason.ERROR), keys.client_channel())
    return Call(int, script("expire_orphans", "ledger"), (*keys.ledger(model), keys.served_by(model)), arguments)


@dataclass(frozen=True)
class Difference:
    """Between what an engine holds and what Redis says it has in flight."""

    unknown: list[str]  # ids that Redis does not know
    foreign: list[str]  # ids that ended, or that another engine has
    returned: int  # requests in flight that the engine does not hold: they wait again


def reconcile(model: str, slot: str, incarnation: int, fingerprint: str, held: Sequence[tuple[str, str]]) -> Call[Difference]:
    """Make the engine's pending list what it holds: `held` has (id, entry) of each request. Raises Fenced, Unowned.

    No `take` of this engine may be under way.
    """
    arguments: list[Argument] = [incarnation, slot, fingerprint, keys.consumer(slot), len(held)]
    for request_id, entry in held:
        arguments += [request_id, entry]

    def decode(answer: list[Any]) -> Difference:
        unknown, foreign, returned = answer
        return Difference([name.decode() for name in unknown], [name.decode() for name in foreign], int(returned))

    return Call(decode, script("reconcile", "ledger"), (*keys.ledger(model), keys.owner(model, slot)), tuple(arguments))


def rebuild(
    model: str,
    slot: str,
    incarnation: int,
    fingerprint: str,
    requests: Sequence[tuple[str, bytes, Mapping[str, Argument]]],
) -> Call[list[str]]:
    """Put requests that the engine holds, and that Redis has forgotten, back into Redis: (id, payload, fields of the record).

    Returns their new entries; "" for one that Redis knows after all, or that was aborted meanwhile. Raises Fenced, Unowned.
    """
    arguments: list[Argument] = [incarnation, slot, fingerprint, keys.consumer(slot), len(requests)]
    for request_id, payload, fields in requests:
        arguments += [request_id, payload, *flat(fields)]
    return Call(
        lambda answer: [entry.decode() for entry in answer],
        script("rebuild", "ledger", "entries"),
        (*keys.ledger(model), keys.owner(model, slot)),
        tuple(arguments),
    )


class StoredPart(NamedTuple):
    client: str | None  # the API server that the message went to; None: a checkpoint, of one request alone
    payload: bytes  # EngineCoreOutputs


def read_journal(model: str, name: str) -> Call[list[StoredPart]]:
    """All messages of a journal, oldest first."""

    def decode(answers: list[Any]) -> list[StoredPart]:
        return [
            StoredPart(flat_fields[i].decode(), flat_fields[i + 1])
            for _, flat_fields in answers[0]
            for i in range(0, len(flat_fields), 2)
        ]

    return Call(decode, commands=(("XRANGE", keys.journal(model, name), "-", "+"),))


def read_checkpoints(model: str, ids: Sequence[str]) -> Call[list[list[StoredPart]]]:
    """What checkpoints stored of each of these requests."""
    return Call(
        lambda answers: [[StoredPart(None, part) for part in parts] for parts in answers],
        commands=tuple(("LRANGE", keys.output(model, request_id), 0, -1) for request_id in ids),
    )
