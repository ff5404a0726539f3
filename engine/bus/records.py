"""The record of a request, as read from its hash, and the calls that read records. A record holds no prompt, unless its answer has
one; the whole output is in it once the request's engine has ended it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from engine.bus import keys
from engine.bus.call import Call, script
from engine.bus.enqueue import Repeated
from engine.protocol import (
    EngineInfo,
    FinishReason,
    RequestOutline,
    RequestTimes,
    StoredChoice,
    StoredOutput,
    decode_info,
    decode_outline,
    decode_stored,
)

ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")  # which the id of an answer has before that of the request
OUTPUT_DROPPED = "The output of this request is not in Redis any more: it gave way to newer ones."
PAGE = 500  # records read at once
MOST_LOOKED_AT = 10_000  # records that one listing of a tenant reads


@dataclass(frozen=True)
class RecordView:
    """Times are epoch seconds, 0.0 where the mark was not passed."""

    id: str
    external_id: str = ""
    state: str = ""  # "queued" (in Redis) | "waiting" (in an engine; of listings alone) | "running" | "ended"
    reason: str = ""  # of an ended one: FinishReason's name in lower case
    error: str = ""
    entry: str = ""  # id in the requests stream
    engine: str = ""  # slot that took it
    incarnation: int = 0  # of the engine
    client: str = ""  # incarnation of the API server that listens
    handle: int = 0
    tenant: str = ""
    model: str = ""
    endpoint: str = ""
    stream: bool = False
    priority: int = 0
    tier: str = ""  # service tier; "": the default
    prompt_tokens: int = 0
    max_tokens: int = 0
    n: int = 1
    output_tokens: int = 0  # summed over choices
    cached_tokens: int = 0
    enqueued: float = 0.0
    received: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    finished: float = 0.0
    preemptions: int = 0
    attempts: int = 0  # engines that died while they ran it, one after the other
    deaths: int = 0  # of engines that ran it, in all
    output_dropped: bool = False  # the output of an ended one gave way to newer ones
    hidden: bool = False  # its client has deleted the answer

    @property
    def must_run_again(self) -> bool:
        """It has no answer for a retry with the same Idempotency-Key. `enqueue` has the same rule."""
        return self.state == "ended" and (self.reason in ("abort", "error") or self.output_dropped)

    @property
    def times(self) -> RequestTimes:
        return RequestTimes(
            self.enqueued, self.received, self.scheduled, self.first_token, self.last_token, self.finished, self.preemptions
        )


# Annotations are strings here (postponed evaluation): "str" | "int" | "float" | "bool".
_PARSERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": lambda value: value == "1", "str": str}
_FIELD_PARSERS = {name: _PARSERS[str(kind)] for name, kind in RecordView.__annotations__.items()}
FIELDS = tuple(_FIELD_PARSERS)


def parse_fields(flat: Sequence[bytes]) -> dict[str, bytes]:
    """A hash as RESP2 gives it: field, value, field, value, ..."""
    return {flat[i].decode(errors="replace"): flat[i + 1] for i in range(0, len(flat), 2)}


def parse_record(fields: Mapping[str, bytes | None]) -> RecordView | None:
    """None where there is no record. Unknown fields (a newer version's) are left aside."""
    if not fields.get("id"):
        return None
    values: dict[str, Any] = {}
    for name, value in fields.items():
        parse = _FIELD_PARSERS.get(name)
        if parse is not None and value is not None:
            values[name] = parse(value.decode())
    return RecordView(**values)


def _read(model: str, request_id: str) -> tuple[str, ...]:
    return ("HMGET", keys.record(model, request_id), *FIELDS)


def _parse(values: Sequence[bytes | None]) -> RecordView | None:
    return parse_record(dict(zip(FIELDS, values, strict=True)))


def record(model: str, request_id: str) -> Call[RecordView | None]:
    return Call(lambda answers: _parse(answers[0]), commands=(_read(model, request_id),))


class Whereabouts(NamedTuple):
    """The part of a record that says where the request's output is."""

    state: str  # "queued" | "running" | "ended" | "unreadable"
    engine: str = ""
    incarnation: int = 0
    reason: str = ""
    error: str = ""
    client: str = ""  # incarnation of the API server that listens
    detached: str = ""  # epoch seconds since when no stream listens; "": one does
    entry: str = ""  # id in the requests stream


def any_given_up(model: str, ids: Sequence[str]) -> Call[bool]:
    """Whether any of these requests has ended without an answer, or its engine has been told to end it so. While a stream is
    attached, no stream of before can order that."""

    def decode(answers: list[Any]) -> bool:
        return any(reason in (b"abort", b"error") or (state != b"ended" and order) for state, reason, order in answers)

    return Call(decode, commands=tuple(("HMGET", keys.record(model, each), "state", "reason", "finish:-1") for each in ids))


def whereabouts(model: str, ids: Sequence[str]) -> Call[list[Whereabouts | None]]:
    """Of each of these requests; None: it has no record."""

    def read(values: Sequence[bytes | None] | Exception) -> Whereabouts | None:
        if isinstance(values, Exception):
            return Whereabouts("unreadable", error=str(values))
        if not values[0]:
            return None
        state, engine, incarnation, *others = ((value or b"").decode(errors="replace") for value in values)
        if incarnation and not incarnation.isdecimal():
            return Whereabouts("unreadable", error=f"incarnation {incarnation!r}")
        return Whereabouts(state, engine, int(incarnation or 0), *others)

    commands = tuple(("HMGET", keys.record(model, each), *Whereabouts._fields) for each in ids)
    return Call(lambda answers: list(map(read, answers)), commands=commands, keep_errors=True)


def _records(model: str, ids: Sequence[bytes]) -> Call[list[RecordView]]:
    """Those of the records that still exist, in the order given; of running ones with the tokens that their engine last told of."""

    def decode(answers: list[Any]) -> Call[list[RecordView]]:
        return _with_progress(model, [view for view in map(_parse, answers) if view is not None])

    return Call(decode, commands=tuple(_read(model, request_id.decode()) for request_id in ids))


def _with_progress(model: str, views: list[RecordView]) -> Call[list[RecordView]]:
    """A record counts output tokens at the end. Until then its engine's snapshot does, and says what waits there."""
    slots = sorted({view.engine for view in views if view.state == "running"})

    def decode(answers: list[Any]) -> list[RecordView]:
        infos = {slot: decode_info(payload) for slot, payload in zip(slots, answers, strict=True) if payload is not None}
        return [_counted(view, infos.get(view.engine)) for view in views]

    return Call(decode, commands=tuple(("GET", keys.slot_info(model, slot)) for slot in slots))


def _counted(view: RecordView, engine: EngineInfo | None) -> RecordView:
    if view.state != "running" or engine is None or engine.incarnation != view.incarnation:
        return view
    if view.id in engine.progress:
        return replace(view, output_tokens=engine.progress[view.id])
    num_tokens = engine.waiting.get(view.id, 0)
    if num_tokens or not view.scheduled:  # preempted, or not begun; else it has begun since the snapshot
        return replace(view, state="waiting", output_tokens=num_tokens)
    return view


def _listing(model: str, index: str, limit: int, tenant: str | None) -> Call[list[RecordView]]:
    """Page by page, because how many there are of other tenants is not known."""
    most = MOST_LOOKED_AT if tenant is not None else limit

    def page(start: int, found: dict[str, RecordView]) -> Call[list[RecordView]]:
        def look(answers: list[Any]) -> Call[list[RecordView]]:
            ids = answers[0]

            def choose(values: list[Any]) -> Call[list[RecordView]]:
                views = [view for view in map(_parse, values) if view is not None and tenant in (None, view.tenant)]
                everything = found | {view.id: view for view in views}  # new records moved some of the last page to this one
                done = len(everything) >= limit or start + PAGE >= most
                return _with_progress(model, list(everything.values())[:limit]) if done else page(start + PAGE, everything)

            reads = tuple(_read(model, request_id.decode()) for request_id in ids)
            return Call(choose, commands=reads) if ids else _with_progress(model, list(found.values()))

        last = min(start + PAGE, most) - 1
        return Call(look, commands=(("ZREVRANGE", index, start, last),))

    return page(0, {})


def live_requests(model: str, limit: int = 1000, tenant: str | None = None) -> Call[list[RecordView]]:
    """Requests that have not ended, newest first. `tenant`: this one's alone."""
    return _listing(model, keys.live(model), limit, tenant)


def ended_requests(model: str, limit: int = 100, tenant: str | None = None) -> Call[list[RecordView]]:
    """Ended requests whose records are still kept, last ended first. `tenant`: this one's alone."""
    return _listing(model, keys.ended(model), limit, tenant)


def find(model: str, request_id: str, limit: int = 1000) -> Call[list[RecordView]]:
    """The requests that a client knows under this id, newest first; and the one that bears it as its internal id."""

    def decode(answers: list[Any]) -> Call[list[RecordView]]:
        found = list(answers[0])
        if request_id.encode() not in found:
            found.append(request_id.encode())
        return _records(model, found)

    return Call(decode, commands=(("ZREVRANGE", keys.external(model, request_id), 0, limit - 1),))


class Found(NamedTuple):
    """A request's record, and the canonical name of the model under which Redis has it."""

    model: str
    record: RecordView


def look_up(models: Sequence[str], request_id: str) -> Call[list[Found]]:
    """The requests of these models under a client's id, an answer's or an internal one, newest first."""
    spellings = {request_id, *(request_id.removeprefix(prefix) for prefix in ANSWER_PREFIXES)}

    def search(places: list[tuple[str, str]], found: dict[str, Found]) -> Call[list[Found]]:
        if not places:
            newest_first = sorted(found.values(), key=lambda each: -each.record.enqueued)
            return Call(lambda answers: newest_first)
        (model, spelling), *others = places
        return find(model, spelling).then(lambda views: search(others, found | {view.id: Found(model, view) for view in views}))

    return search([(model, spelling) for model in models for spelling in sorted(spellings)], {})


def outlines(model: str, ids: Sequence[str]) -> Call[list[RequestOutline | None]]:
    """Of requests in any state; None: there is no record, or no outline that this version can read."""

    def read(payload: bytes | None) -> RequestOutline | None:
        try:
            return decode_outline(payload) if payload is not None else None
        except msgspec.DecodeError:
            return None

    return Call(
        lambda answers: list(map(read, answers)), commands=tuple(("HGET", keys.record(model, each), "outline") for each in ids)
    )


def live_payloads(model: str, ids: Sequence[str]) -> Call[list[bytes | None]]:
    """EngineCoreRequests as they were enqueued; None: the request has ended, or is not there."""

    def read(answers: list[Any]) -> list[bytes | None]:
        return [parse_fields(found[0][1]).get("payload") if found else None for found in answers]

    def look(entries: list[bytes | None]) -> Call[list[bytes | None]]:
        return Call(read, commands=tuple(("XRANGE", keys.requests(model), entry or b"0-1", entry or b"0-1") for entry in entries))

    return Call(look, commands=tuple(("HGET", keys.record(model, each), "entry") for each in ids))


def repeated(models: Sequence[str], tenant: str, key: str) -> Call[tuple[str, Repeated] | None]:
    """The request that this tenant sent with this Idempotency-Key, and its canonical model."""

    def decode(answers: list[Any]) -> tuple[str, Repeated] | None:
        for model, value in zip(models, answers, strict=True):
            if value is not None:
                body_hash, request_id = value.decode().split(" ")
                return model, Repeated(request_id, body_hash)
        return None

    return Call(decode, commands=tuple(("GET", keys.idempotency(model, tenant, key)) for model in models))


def hide(model: str, request_id: str) -> Call[str]:
    """Show the answer of a request to no client any more, and drop what an ended one has kept. Returns its state, or "unknown"."""
    return Call(lambda answer: answer.decode(), script("hide", "ledger"), keys.ledger(model), (request_id,))


def stored_output(model: str, request_id: str) -> Call[StoredOutput | None]:
    """The output of an ended request. None: it has not ended, or its record is gone.

    A request that its engine did not end has no tokens stored: it was aborted while it waited, or its engine died. Each choice is
    then empty, with the record's reason and error. An output that gave way to newer ones is empty too, and its error says so.
    """

    def decode(answers: list[Any]) -> StoredOutput | None:
        *fields, output = answers[0]
        view = _parse(fields)
        if view is None or view.state != "ended":
            return None
        if output:
            return decode_stored(output)
        if view.output_dropped:
            return StoredOutput(
                [StoredChoice(b"", FinishReason.ERROR, None, OUTPUT_DROPPED)] * view.n, view.cached_tokens, view.times
            )
        reason = FinishReason[view.reason.upper()]
        choices = [StoredChoice(b"", reason, None, view.error or None) for _ in range(view.n)]
        return StoredOutput(choices, view.cached_tokens, view.times)

    return Call(decode, commands=((*_read(model, request_id), "output"),))
