"""The outputs of engines in Redis: the flush of a step, checkpoints, and what an engine reads that continues requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from engine.bus import keys
from engine.bus.call import Argument, Call, flat, milliseconds, script
from engine.protocol import FinishReason

JOURNAL_TTL = 3600.0  # seconds that a journal outlives its engine
KEPT_BYTES = 256 << 20  # of the outputs in the records of ended requests; then the oldest go


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

    `number` rises with each flush of an incarnation, and `previous` is the number of the flush before. So a flush sent twice counts
    once, and Redis notices one that it lost. `messages`: (API server incarnation, ClientMessage bytes), one each. `started`: record
    fields of running requests. `notices`: (channel, ClientMessage bytes), published and not journaled.
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
