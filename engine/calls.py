"""The operations on requests as calls: enqueue, take, flush, finish, bury, and control. Every other module names calls from here.

Each one that changes state is one script (engine/lua), all or nothing, and safe to send twice.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from engine import keys
from engine.liveness import ApiServer as ApiServer
from engine.liveness import ClaimedSlot as ClaimedSlot
from engine.liveness import DeadEngine as DeadEngine
from engine.liveness import DeathWatch as DeathWatch
from engine.liveness import Observation as Observation
from engine.liveness import announce_api as announce_api
from engine.liveness import beat as beat
from engine.liveness import beat_api as beat_api
from engine.liveness import claim_slot as claim_slot
from engine.liveness import engines as engines
from engine.liveness import live_apis as live_apis
from engine.liveness import models as models
from engine.liveness import observe as observe
from engine.liveness import release_api as release_api
from engine.liveness import release_slot as release_slot
from engine.protocol import (
    Abort,
    ControlCommand,
    EngineCoreRequest,
    FinishReason,
    TokenizerBundle,
    decode_bundle,
    decode_control,
    encode,
)
from engine.records import RecordView as RecordView
from engine.records import ended_requests as ended_requests
from engine.records import find as find
from engine.records import live_requests as live_requests
from engine.records import parse_fields, parse_record
from engine.records import record as record
from engine.records import stored_output as stored_output
from engine.scripts import BusUnavailable as BusUnavailable
from engine.scripts import Call as Call
from engine.scripts import Fenced as Fenced
from engine.scripts import script

RECORD_RETENTION = 3600.0  # seconds that the record of an ended request is kept
TOMBSTONE_TTL = 600.0  # seconds that an abort waits for a request that it overtook
MEMORY_SHARE = 0.8  # of maxmemory, beyond which nothing new is admitted
JOURNAL_STEPS = 4096  # kept of an engine's journal, about
JOURNAL_TTL = 600.0  # seconds that a journal outlives its engine
CONTROL_COMMANDS = 65536  # kept of a control stream, about
CONTROL_TTL = 600.0
MAX_EXACT = 2**53  # Lua's numbers are doubles

_LEDGER = ("ledger",)


def _ledger_keys(model: str) -> tuple[str, ...]:
    """KEYS of every script that moves requests, in the order of lua/ledger.lua."""
    return (
        keys.requests(model),
        keys.order(model),
        keys.live(model),
        keys.ended(model),
        keys.load(model),
        keys.usage(model),
        keys.record(model),
        keys.external(model),
        keys.tombstone(model),
    )


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _seconds(timestamp: float) -> str:
    return f"{timestamp:.6f}"


@dataclass(frozen=True)
class RequestFacts:
    """What the record shall say of a request that its engine needs not know."""

    external_id: str  # the id that the client knows it by; several requests may share one
    endpoint: str = ""
    stream: bool = False
    model: str = ""  # the name that the client asked for


@dataclass(frozen=True)
class AdmissionLimits:
    max_num_queued_reqs: int | None = None  # choices waiting or running for the model, the new ones included
    max_num_queued_tokens: int | None = None  # prompt tokens waiting for the model, before the new ones
    require_engine: bool = True  # refuse where no engine of the model lives
    memory_share: float = MEMORY_SHARE  # of Redis' maxmemory, where it is set; 0: not checked


@dataclass(frozen=True)
class Enqueued:
    entries: list[str]  # ids in the requests stream, in the order of the requests


@dataclass
class Refused(Exception):
    """Nothing of the list was enqueued."""

    reason: str  # "max_num_queued_reqs" | "max_num_queued_tokens" | "no_engine" | "memory" | "aborted" | "duplicate"
    value: int = 0  # what was measured against the limit; bytes for "memory"
    limit: int = 0
    request_id: str = ""  # of an "aborted" or "duplicate" one

    def __str__(self) -> str:
        match self.reason:
            case "max_num_queued_reqs":
                return f"{self.value} requests wait or run, the limit is {self.limit}"
            case "max_num_queued_tokens":
                return f"{self.value} prompt tokens wait, the limit is {self.limit}"
            case "memory":
                return f"Redis uses {self.value} bytes, new requests stop at {self.limit}"
            case "no_engine":
                return "no engine serves the model now"
            case "aborted":
                return f"request {self.request_id} was aborted before it came"
            case _:
                return f"request {self.request_id} exists already"


def enqueue(
    model: str, requests: Sequence[EngineCoreRequest], facts: RequestFacts, limits: AdmissionLimits | None = None
) -> Call[Enqueued | Refused]:
    """All of the requests or none. Sent again by the same API server under the same ids and handles, it succeeds again."""
    limits = limits or AdmissionLimits()
    now = _seconds(time.time())
    arguments: list[str | bytes | int | float] = [
        now,
        -1 if limits.max_num_queued_reqs is None else limits.max_num_queued_reqs,
        -1 if limits.max_num_queued_tokens is None else limits.max_num_queued_tokens,
        int(limits.require_engine),
        limits.memory_share,
        keys.wake_channel(model),
        len(requests),
    ]
    for request in requests:
        if not 0 <= request.handle < MAX_EXACT:
            raise ValueError(f"handle {request.handle} does not fit 53 bits")
        fields: dict[str, str | int] = {
            "id": request.request_id,
            "external_id": facts.external_id,
            "state": "queued",
            "client": request.client,
            "handle": request.handle,
            "tenant": request.tenant,
            "model": facts.model or model,
            "endpoint": facts.endpoint,
            "stream": int(facts.stream),
            "priority": request.priority,
            "prompt_tokens": len(request.prompt_token_ids) // 4,
            "max_tokens": request.sampling.max_tokens,
            "n": request.sampling.n,
            "enqueued": now,
        }
        arguments += [request.request_id, encode(request), 2 * len(fields)]
        for name, value in fields.items():
            arguments += [name, value]

    def decode(answer: list[Any]) -> Enqueued | Refused:
        if answer[0] == b"ok":
            return Enqueued([entry.decode() for entry in answer[1:]])
        reason, value, limit, request_id = answer[1:]
        return Refused(reason.decode(), int(value), int(limit), request_id.decode())

    return Call(
        decode,
        script=script("enqueue", *_LEDGER),
        keys=(*_ledger_keys(model), keys.slots(model), keys.slot(model)),
        arguments=tuple(arguments),
    )


class Taken(NamedTuple):
    entry: str  # id in the requests stream
    payload: bytes  # EngineCoreRequest


def _decode_taken(answer: list[Any]) -> list[Taken]:
    return [Taken(entry.decode(), payload) for entry, payload in answer]


def take(model: str, slot: str, incarnation: int, count: int) -> Call[list[Taken]]:
    """At most `count` of the requests that wait, by priority, then arrival; they are the slot's from now on. Raises Fenced.

    The call carries a nonce: run again after an answer was lost, the same Call gives the same requests. A caller that got
    BusUnavailable runs the same Call again, or asks `owned` what it was given.
    """
    return Call(
        _decode_taken,
        script=script("take", *_LEDGER),
        keys=(*_ledger_keys(model), keys.slot(model, slot), keys.taken(model, slot)),
        arguments=(slot, incarnation, count, secrets.token_hex(8), _seconds(time.time()), keys.consumer(slot)),
    )


def owned(model: str, slot: str, incarnation: int) -> Call[list[Taken]]:
    """What the ledger says that this incarnation has in flight: all that `take` gave it and no `flush` ended. Raises Fenced."""
    return Call(
        _decode_taken,
        script=script("owned", *_LEDGER),
        keys=(*_ledger_keys(model), keys.slot(model, slot)),
        arguments=(slot, incarnation, keys.consumer(slot)),
    )


def reject(model: str, slot: str, incarnation: int, entry: str, error: str, retention: float = RECORD_RETENTION) -> Call[bool]:
    """End, with an error, a taken entry whose payload cannot be read; False: it was not this incarnation's. Raises Fenced."""
    arguments = (
        incarnation,
        entry,
        int(FinishReason.ERROR),
        error,
        _seconds(time.time()),
        _milliseconds(retention),
        keys.client_channel(),
    )
    return Call(bool, script("reject", *_LEDGER), (*_ledger_keys(model), keys.slot(model, slot)), arguments)


@dataclass(frozen=True)
class EndedRequest:
    """One request (all its choices) that its engine ended."""

    request_id: str
    reason: FinishReason  # of the request as a whole
    output: bytes  # StoredOutput
    output_tokens: int  # summed over choices
    cached_tokens: int = 0
    error: str | None = None
    fields: Mapping[str, str] = field(
        default_factory=dict
    )  # further record fields: scheduled, first_token, last_token, preemptions


def flush(
    model: str,
    slot: str,
    incarnation: int,
    step: int,
    messages: Sequence[tuple[str, bytes]] = (),
    started: Sequence[tuple[str, Mapping[str, str]]] = (),
    ended: Sequence[EndedRequest] = (),
    notices: Sequence[tuple[str, bytes]] = (),
    retention: float = RECORD_RETENTION,
) -> Call[int]:
    """What a step brought, at once: journal entry, publications, records. 1: done; 0: the step was flushed before. Raises Fenced.

    `messages`: (API server incarnation, ClientMessage bytes), one each. `step` rises from flush to flush of an incarnation; a flush
    with a step that is not higher than the last one's is taken for a resend. `started`: record fields of running requests.
    `notices`: (channel, ControlReply bytes).
    """
    arguments: list[str | bytes | int | float] = [
        incarnation,
        step,
        _seconds(time.time()),
        _milliseconds(retention),
        JOURNAL_STEPS,
        _milliseconds(JOURNAL_TTL),
        keys.client_channel(),
        len(messages),
        len(started),
        len(ended),
        len(notices),
    ]
    for client, payload in messages:
        arguments += [client, payload]
    for request_id, fields in started:
        arguments += [request_id, 2 * len(fields)]
        for name, value in fields.items():
            arguments += [name, value]
    for request in ended:
        facts: dict[str, str | bytes | int] = {
            "reason": str(request.reason),
            "output_tokens": request.output_tokens,
            "cached_tokens": request.cached_tokens,
            "output": request.output,
            **request.fields,
        }
        if request.error is not None:
            facts["error"] = request.error
        arguments += [request.request_id, 2 * len(facts)]
        for name, fact in facts.items():
            arguments += [name, fact]
    for channel, payload in notices:
        arguments += [channel, payload]
    return Call(
        int,
        script=script("flush", *_LEDGER),
        keys=(*_ledger_keys(model), keys.slot(model, slot), keys.journal(model, slot, incarnation)),
        arguments=tuple(arguments),
    )


@dataclass(frozen=True)
class FinishOutcome:
    """`state` before the call: "queued" (it is ended now), "running" (its engine was told and answers), "ended" or "unknown"."""

    state: str
    record: RecordView | None


def finish(
    model: str, request_id: str, command: Abort, error: str | None = None, retention: float = RECORD_RETENTION
) -> Call[FinishOutcome]:
    """End a request in whatever state it is. An unknown id leaves a tombstone, so that the request is refused when it comes late.

    With a choice (>= 0) of a request of several choices that still waits, nothing happens: what has no output needs no stop.
    """
    arguments = (
        request_id,
        int(command.reason),
        str(command.reason),
        error or "",
        command.choice,
        encode(command),
        _seconds(time.time()),
        _milliseconds(retention),
        _milliseconds(TOMBSTONE_TTL),
        CONTROL_COMMANDS,
        _milliseconds(CONTROL_TTL),
        keys.client_channel(),
        keys.control_channel(model),
    )

    def decode(answer: list[Any]) -> FinishOutcome:
        return FinishOutcome(answer[0].decode(), parse_record(parse_fields(answer[1])))

    return Call(decode, script("finish", *_LEDGER), (*_ledger_keys(model), keys.control(model)), arguments)


BURY_BATCH = 128  # pending entries looked at in one script: Redis answers nobody else meanwhile


def bury(model: str, slot: str, incarnation: int, error: str, retention: float = RECORD_RETENTION) -> Call[int]:
    """End, with an error, what the slot's engines up to `incarnation` had in flight; how many requests that were.

    Refuses (0) while the slot is held by one of these incarnations (see `declare_dead`). Bounded batches follow one another.
    """

    def batch(start: str, buried: int) -> Call[int]:
        def decode(answer: list[Any]) -> int | Call[int]:
            done = buried + int(answer[0])
            return batch(answer[1].decode(), done) if answer[1] else done

        arguments = (
            incarnation,
            int(FinishReason.ERROR),
            error,
            _seconds(time.time()),
            _milliseconds(retention),
            BURY_BATCH,
            start,
            keys.consumer(slot),
            keys.client_channel(),
        )
        return Call(decode, script("bury", *_LEDGER), (*_ledger_keys(model), keys.slot(model, slot)), arguments)

    return batch("-", 0)


def declare_dead(model: str, slot: str, incarnation: int, error: str, retention: float = RECORD_RETENTION) -> Call[int]:
    """For who saw the engine's process exit: its slot is free at once, and what it had in flight is buried."""
    release = release_slot(model, slot, incarnation)
    burial = bury(model, slot, incarnation, error, retention)
    return Call(lambda _: burial, release.script, release.keys, release.arguments)


def control(model: str, slot: str, incarnation: int, command: ControlCommand) -> Call[None]:
    """Put a command before one engine incarnation. A later holder of the slot leaves it aside."""
    stream = keys.control(model, slot)
    commands = (
        ("XADD", stream, "MAXLEN", "~", CONTROL_COMMANDS, "*", "incarnation", incarnation, "command", encode(command)),
        ("PEXPIRE", stream, _milliseconds(CONTROL_TTL)),
        ("PUBLISH", keys.control_channel(model, slot), b""),
    )
    return Call(lambda answers: None, commands=commands, transaction=True)


@dataclass(frozen=True)
class ControlBatch:
    last_id: str  # where to read on
    commands: list[ControlCommand]


def read_control(
    model: str, slot: str, incarnation: int, last_id: str = "0", block: float = 0.0, count: int = 1024
) -> Call[ControlBatch]:
    """Commands for this incarnation behind `last_id`; waits at most `block` seconds for one. Commands that this version cannot
    read are left aside."""
    options = ("BLOCK", _milliseconds(block)) if block > 0 else ()

    def decode(answers: list[Any]) -> ControlBatch:
        entries = answers[0][0][1] if answers[0] else []
        commands: list[ControlCommand] = []
        for _, flat in entries:
            fields = parse_fields(flat)
            if int(fields["incarnation"]) != incarnation:
                continue
            try:
                commands.append(decode_control(fields["command"]))
            except msgspec.DecodeError:
                continue
        return ControlBatch(entries[-1][0].decode() if entries else last_id, commands)

    command = ("XREAD", "COUNT", count, *options, "STREAMS", keys.control(model, slot), last_id)
    return Call(decode, commands=(command,), block=block)


def publish(channel: str, payload: bytes) -> Call[int]:
    """A hint or a reply, to whoever listens now; the number of listeners."""
    return Call(lambda answers: int(answers[0]), commands=(("PUBLISH", channel, payload),))


def put_tokenizer(model: str, content_hash: str, bundle: TokenizerBundle) -> Call[None]:
    return Call(lambda answers: None, commands=(("SET", keys.tokenizer(model, content_hash), encode(bundle)),))


def get_tokenizer(model: str, content_hash: str) -> Call[TokenizerBundle | None]:
    return Call(
        lambda answers: None if answers[0] is None else decode_bundle(answers[0]),
        commands=(("GET", keys.tokenizer(model, content_hash)),),
    )


@dataclass(frozen=True)
class QueueDepth:
    queued: int  # requests that wait
    queued_tokens: int  # their prompt tokens
    live: int  # requests that wait or run
    choices: int  # their choices


def queue_depth(model: str) -> Call[QueueDepth]:
    def decode(answers: list[Any]) -> QueueDepth:
        choices, tokens = answers[2]
        return QueueDepth(int(answers[0]), int(tokens or 0), int(answers[1]), int(choices or 0))

    commands = (
        ("ZCARD", keys.order(model)),
        ("ZCARD", keys.live(model)),
        ("HMGET", keys.load(model), "requests", "tokens"),
    )
    return Call(decode, commands=commands, transaction=True)
