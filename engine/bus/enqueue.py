"""`enqueue`, which puts requests into the queue: its arguments, its limits and its refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from engine.bus import keys
from engine.bus.call import Argument, Call, flat, milliseconds, script
from engine.protocol import EngineCoreRequest, RequestFacts, encode

MEMORY_SHARE = 0.8  # of maxmemory, beyond which nothing new is admitted
QUEUE_LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens", "max_queue_seconds")  # reasons of refusal
OUTPUTS_DROPPED_AT_ONCE = 256  # Redis answers no other client meanwhile
SLICE = 32  # requests that one script enqueues: Redis answers no other client meanwhile
SLICE_BYTES = 1 << 20  # of their payloads
STAGED_TTL = 60.0  # seconds after which a slice goes whose list was not enqueued
MAX_EXACT = 2**53  # Lua's numbers are doubles


@dataclass(frozen=True)
class AdmissionLimits:
    max_num_queued_reqs: int | None = None  # choices waiting or running for the model, the new ones included
    max_num_queued_tokens: int | None = None  # prompt tokens waiting for the model, before the new ones
    max_num_waiting: int | None = None  # choices waiting for the model, before the new ones: as many as --max-queue-seconds allows
    require_engine: bool = True  # refuse where no engine of the model lived within the failover time
    memory_share: float = MEMORY_SHARE  # of Redis' maxmemory, where it is set; 0: not checked


class Enqueued(NamedTuple):
    entries: list[str]  # ids in the requests stream, in the order of the requests
    num_before: int = 0  # requests that wait before the first one


@dataclass
class Refused(Exception):
    """Nothing of the list was enqueued."""

    reason: str  # a name of QUEUE_LIMITS, or "no_engine" | "memory" | "aborted" | "duplicate"
    value: int = 0  # what was measured against the limit; bytes for "memory"
    limit: int = 0
    request_id: str = ""  # of an "aborted" or "duplicate" one
    of_tenant: bool = False  # value and limit are the tenant's: others may still send requests

    def __str__(self) -> str:
        of, limit = (" of this tenant", "its share of the limit") if self.of_tenant else ("", "the limit")
        match self.reason:
            case "max_num_queued_reqs":
                return f"with the new ones {self.value} choices{of} would wait or run, {limit} is {self.limit}"
            case "max_num_queued_tokens":
                return f"{self.value} prompt tokens{of} wait, {limit} is {self.limit}"
            case "max_queue_seconds":
                return f"{self.value} choices{of} wait, {self.limit} can be begun in the longest time that one may wait"
            case "memory":
                return f"Redis uses {self.value} bytes, new requests stop at {self.limit}"
            case "no_engine":
                return "no engine serves the model now"
            case "aborted":
                return f"request {self.request_id} was aborted before it came"
            case _:
                return f"request {self.request_id} exists already"


@dataclass
class Repeated(Exception):
    """A request with the same Idempotency-Key lives, or has ended well: nothing was enqueued."""

    request_id: str  # the first one of that HTTP request's list
    body_hash: str  # `RequestFacts.body_hash` of that one


def enqueue(
    model: str, requests: Sequence[EngineCoreRequest], limits: AdmissionLimits | None = None
) -> Call[Enqueued | Refused | Repeated]:
    """All of the requests, which are those of one HTTP request, or none. Sent again by the same API server under the same ids and
    handles, it succeeds again."""
    bounds = _bounds(model, limits or AdmissionLimits())
    parts = [_part(request, model) for request in requests]
    slices = _slices(parts)
    if len(slices) > 1:
        return _stage(model, slices, requests, bounds)
    return Call(
        _outcome,
        script("enqueue", "ledger", "takers", "entries", "memory", "admission"),
        (*keys.ledger(model), keys.served(model)),
        (*bounds, len(parts), *chain.from_iterable(parts)),
    )


def _bounds(model: str, limits: AdmissionLimits) -> tuple[Argument, ...]:
    most = (limits.max_num_queued_reqs, limits.max_num_queued_tokens, limits.max_num_waiting)
    any_number = (-1 if limit is None else limit for limit in most)
    return (*any_number, int(limits.require_engine), limits.memory_share, keys.wake_channel(model))


def _part(request: EngineCoreRequest, model: str) -> list[Argument]:
    """A request as the scripts take it."""
    if not 0 <= request.handle < MAX_EXACT:
        raise ValueError(f"handle {request.handle} does not fit 53 bits")
    return [request.request_id, encode(request), *flat(first_fields(request, model))]


def _slices(parts: Sequence[list[Argument]]) -> list[list[list[Argument]]]:
    """Slices that Redis takes in without keeping other clients waiting."""
    slices: list[list[list[Argument]]] = [[]]
    num_bytes = 0
    for part in parts:
        payload = part[1]
        assert isinstance(payload, bytes)
        if slices[-1] and (len(slices[-1]) == SLICE or num_bytes + len(payload) > SLICE_BYTES):
            slices.append([])
            num_bytes = 0
        slices[-1].append(part)
        num_bytes += len(payload)
    return slices


def _stage(
    model: str, slices: list[list[list[Argument]]], requests: Sequence[EngineCoreRequest], bounds: tuple[Argument, ...]
) -> Call[Enqueued | Refused | Repeated]:
    """Slice after slice, then all at once into the queue."""
    if not slices:
        pairs: list[Argument] = []
        for request in requests:
            pairs += [request.request_id, request.handle]
        return Call(
            _outcome,
            script("commit", "ledger", "takers", "entries", "memory", "admission"),
            (*keys.ledger(model), keys.served(model), keys.staged(model)),
            (*bounds, requests[0].client, len(requests), *pairs),
        )
    first, *others = slices

    def decode(answer: list[Any]) -> Enqueued | Refused | Repeated | Call[Enqueued | Refused | Repeated]:
        return _stage(model, others, requests, bounds) if answer[0] == b"ok" else _outcome(answer)

    return Call(
        decode,
        script("stage", "ledger", "entries", "memory", "admission"),
        (*keys.ledger(model), keys.staged(model)),
        (bounds[4], milliseconds(STAGED_TTL), len(first), *chain.from_iterable(first)),
    )


def _outcome(answer: list[Any]) -> Enqueued | Refused | Repeated:
    if answer[0] == b"ok":
        return Enqueued([entry.decode() for entry in answer[2:]], int(answer[1] or 0))
    if answer[0] == b"repeated":
        return Repeated(answer[1].decode(), answer[2].decode())
    reason, value, limit, request_id, of_tenant = answer[1:]
    return Refused(reason.decode(), int(value), int(limit), request_id.decode(), of_tenant == b"1")


def accepts(memory_share: float = MEMORY_SHARE) -> Call[Refused | None]:
    """Whether Redis would take a new request, its model's limits aside; None: it would. Raises BusUnavailable as `enqueue`."""

    def decode(answer: list[Any]) -> Refused | None:
        return Refused("memory", int(answer[0]), int(answer[1])) if answer else None

    return Call(decode, script=script("accepts", "memory"), arguments=(memory_share,))


def make_room(model: str, memory_share: float = MEMORY_SHARE) -> Call[int]:
    """Drop the oldest outputs of ended requests while Redis has no memory for new requests. Returns how many, some hundreds at
    most."""
    return Call(int, script("make_room", "ledger", "memory"), keys.ledger(model), (memory_share, OUTPUTS_DROPPED_AT_ONCE))


def first_fields(request: EngineCoreRequest, model: str) -> dict[str, Argument]:
    """The record of a request as it comes; the script adds entry and time."""
    facts = request.facts
    return {
        "id": request.request_id,
        "version": request.version,
        "external_id": facts.external_id or request.request_id,
        "state": "queued",
        "client": request.client,
        "handle": request.handle,
        "tenant": request.tenant,
        "model": facts.model or model,
        "endpoint": facts.endpoint,
        "stream": int(facts.stream),
        "retention": milliseconds(facts.retention),
        "priority": request.priority,
        "prompt_tokens": len(request.prompt_token_ids) // 4,
        "max_tokens": request.sampling.max_tokens,
        "n": request.sampling.n,
        "outline": encode(request.outline()),
        **_optional_fields(facts, model, request.tenant),
    }


def _optional_fields(facts: RequestFacts, model: str, tenant: str) -> dict[str, Argument]:
    fields: dict[str, Argument] = {}
    if facts.grace:
        fields["grace"] = milliseconds(facts.grace)
    if facts.idempotency_key:
        fields |= {"idempotency": keys.idempotency(model, tenant, facts.idempotency_key), "body_hash": facts.body_hash}
    if facts.tier:
        fields["tier"] = facts.tier
    if facts.weight != 1.0:
        fields["weight"] = facts.weight
    if facts.timeout:
        fields["timeout"] = facts.timeout
    if facts.queue_timeout:
        fields["queue_timeout"] = facts.queue_timeout
    return fields
