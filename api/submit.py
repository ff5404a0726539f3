"""From a body to its response: preparation, admission, enqueue, refusals. No 200 goes out before `enqueue` has answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fastapi import Request
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Scope

from api.admission import engines_of, protocol_version, queue_headers, refusal_error
from api.app_state import Service, principal_of, service_of
from api.continuation import followed_answer, recall, retried_stream
from api.errors import RETRY_AFTER, ApiError, BadRequest, IdempotencyKeyReused, ServiceUnavailable
from api.http.auth import derive_cache_salt
from api.http.headers import header
from api.http.key_ring import Principal
from api.http.persistence import MAX_STREAMED_CHOICES, grace_time, idempotency_key
from api.http.request_ids import answer_headers, body_id, header_id, internal_ids
from api.http.response_writer import response_writer
from api.model_files import ServedModel
from api.preparation.rules import RequestRules
from api.preparation.task import Task
from api.request.schemas import RequestFields
from api.response.answer import Unheard, WholeAnswer, whole_response
from api.response.answer_format import AnswerFormat
from api.response.generation import Generation
from api.response.sse import EventSink, EventStream
from api.response.stream_position import StreamPosition
from api.service_tiers import in_tier, used_tier
from api.stored_responses import response_now
from api.time_limits import TimeLimits, time_limits
from engine.bus import records
from engine.bus.enqueue import Refused, Repeated
from engine.client.admission import estimated_wait
from engine.client.client import AsyncClient
from engine.config import ApiConfig
from engine.protocol import FOREVER, EngineCoreRequest, RequestFacts, encode_column

B = TypeVar("B", bound=RequestFields)

MakeFormat = Callable[[Generation, ApiConfig, StreamPosition | int | None], AnswerFormat]

PRIORITY_HEADER = "X-Vllm-Priority"
TRACE_HEADERS = ("traceparent", "tracestate")
INT64 = range(-(2**63), 2**63)


async def generate(
    request: Request,
    body: B,
    prepare: Callable[[B, ServedModel, RequestRules], Task],
    format: MakeFormat,
    in_place: bool = False,
) -> Response:
    """Prepare `body`, enqueue it and answer in `format`. `in_place`: preparing it takes less time than a thread costs.

    Raises ApiError and BusUnavailable where nothing was enqueued, and where the engine gave up before the response began.
    """
    service = service_of(request)
    _admit(service)
    limits = time_limits(request.scope, body, service.config)
    grace = grace_time(request.scope, body.resumable, service.config)
    if (earlier := await earlier_answer(request)) is not None:
        return earlier
    model = await service.resolve(body.model)
    _check_queue(request, model)
    task = prepare(body, model, service.rules) if in_place else await service.prepare(request, prepare, body, model)
    if task.tier:
        task = in_tier(task, used_tier(task.tier, principal_of(request).tenant, service.config))
    generation = _make_generation(request, task, body.request_id, FOREVER if task.background else grace)
    try:
        return await _answer(request, generation, format, limits)
    except Repeated as repeated:  # another API server enqueued it meanwhile
        return await _repeat(request, task.model.canonical_name, repeated)


async def earlier_answer(request: Request) -> Response | None:
    """The answer of the request that was sent with the same Idempotency-Key before, where it lives or has ended well."""
    service, key = service_of(request), idempotency_key(request.scope)
    if not key:
        return None
    models = sorted(service.client.directory.known_models)
    found = await service.bus.run(records.repeated(models, principal_of(request).tenant, key))
    if found is None:
        return None
    model, repeated = found
    record = await service.client.record(model, repeated.request_id)
    if record is None or record.must_run_again:
        return None
    return await _repeat(request, model, repeated)


async def _repeat(request: Request, model: str, repeated: Repeated) -> Response:
    """The answer of the request that another one repeats. Raises IdempotencyKeyReused."""
    if repeated.body_hash != request.state.body_hash:
        message = "This Idempotency-Key was used with another request. Send another key, or the same request."
        raise IdempotencyKeyReused(message, param="Idempotency-Key")
    service = service_of(request)
    record = await service.client.record(model, repeated.request_id)
    if record is None:
        raise ServiceUnavailable("The request with this Idempotency-Key is gone. Try again.", headers=RETRY_AFTER)
    recalled = await recall(service, model, record)
    task = recalled.generation.task
    if task.stream:
        return await retried_stream(request, recalled)
    if task.background:
        return Response(await response_now(service, recalled, record), media_type="application/json")
    return await followed_answer(request, recalled)


def _admit(service: Service) -> None:
    """Raises ServiceUnavailable when the server's time is up."""
    if service.closing:
        raise ServiceUnavailable("The server is shutting down.", headers=RETRY_AFTER)


def _check_queue(request: Request, model: ServedModel) -> None:
    """Refuse early what the queue would refuse: before its template and its tokens cost anything."""
    service = service_of(request)
    try:
        service.admission.check(service.client, model.canonical_name, principal_of(request).tenant)
    except Refused as refusal:
        raise _refused(service, model, refusal) from refusal


def _refused(service: Service, model: ServedModel, refusal: Refused) -> ApiError:
    service.metrics.refused(model.first_name, refusal.reason)
    return refusal_error(refusal, engines_of(service.client, model.canonical_name))


def _make_generation(request: Request, task: Task, given_id: str | None, grace: float) -> Generation:
    """The generation that will answer `request`; nothing of it is enqueued yet. `given_id`: the body's. Raises BadRequest."""
    own: str = request.state.request_id
    external = header_id(request.scope) or body_id(given_id) or own
    ids = internal_ids(external, len(task.prompts))
    return Generation(task, external, ids, time.time(), principal_of(request).tenant, service_of(request).observer, grace)


async def _answer(request: Request, generation: Generation, make_format: MakeFormat, limits: TimeLimits) -> Response:
    """Enqueue the prompts of `generation` and make the response: events as they come, or all in one piece."""
    service, headers = service_of(request), answer_headers(generation.external_id, generation.internal_ids)
    if generation.task.stream:
        format = make_format(generation, service.config, _first_position(generation))
        events = generation.sink = EventSink(format, service.output_budget)
        try:
            headers |= await _submit(request, generation, limits)
        except BaseException:
            events.close()
            raise
        estimate = partial(_estimated_wait, service, generation.task.model.canonical_name)
        return EventStream(generation, events, headers, service.config.sse_keep_alive_interval, estimate)
    format = make_format(generation, service.config, None)
    if generation.task.background:
        generation.sink = Unheard(generation.close)
        headers |= await _submit(request, generation, limits)
        return Response(format.unfinished("queued"), media_type="application/json", headers=headers)
    whole = generation.sink = WholeAnswer(generation.task.num_choices, format.tells_each_output)
    headers |= await _submit(request, generation, limits)
    return await whole_response(generation, whole, format, response_writer(request.scope), headers)


def _estimated_wait(service: Service, model: str, num_before: int) -> float | None:
    return estimated_wait(num_before, engines_of(service.client, model))


def _first_position(generation: Generation) -> StreamPosition | None:
    """Of a stream that can be continued. Raises BadRequest."""
    if not generation.grace:
        return None
    num_choices = generation.task.num_choices
    if num_choices > MAX_STREAMED_CHOICES:
        message = f"A resumable stream has at most {MAX_STREAMED_CHOICES} choices, its prompts times n; this one has {num_choices}."
        raise BadRequest(message, param="resumable")
    return StreamPosition(num_choices)


async def _submit(request: Request, generation: Generation, limits: TimeLimits) -> dict[str, str]:
    """Enqueue all prompts of `generation` or none. Returns headers that say where the first one stands in the queue."""
    service = service_of(request)
    _admit(service)
    task = generation.task
    facts = RequestFacts(
        generation.external_id,
        service.config.record_retention,
        task.endpoint,
        task.stream,
        task.model.name,
        generation.arrival,
        generation.grace,
        num_prompts=len(task.prompts),
        idempotency_key=idempotency_key(request.scope),
        body_hash=getattr(request.state, "body_hash", ""),
        answer=task.answer,
        weight=service.admission.weight(generation.tenant),
        timeout=limits.total,
        queue_timeout=limits.waiting,
        kept_body=task.kept_body,
        tier=task.tier,
    )
    requests = _engine_requests(request.scope, principal_of(request), service.client, generation, facts)
    client, model = service.client, task.model.canonical_name
    try:
        streams = await client.add(model, requests, generation.runs, service.admission.limits(client, model))
    except Refused as refusal:
        service.admission.note_refusal(client, model, generation.tenant, refusal)
        raise _refused(service, task.model, refusal) from refusal
    generation.begin(streams)
    if limits.total:
        generation.limit_time(limits.total)
    return queue_headers(streams[0].num_before or 0, engines_of(client, model))


def _engine_requests(
    scope: Scope, principal: Principal, client: AsyncClient, generation: Generation, facts: RequestFacts
) -> list[EngineCoreRequest]:
    """`facts`: all but what differs from prompt to prompt. Raises BadRequest, ServiceUnavailable."""
    task = generation.task
    priority = _priority(scope, task.priority)
    if not task.model.takes_priorities:
        priority = 0
    trace = {name: value for name in TRACE_HEADERS if (value := header(scope, name.encode())) is not None}
    salt = derive_cache_salt(principal, task.cache_salt)
    version = protocol_version(client, task.model.canonical_name)
    return [
        EngineCoreRequest(
            version,
            internal_id,
            encode_column(prompt.token_ids),
            sampling,
            client.incarnation,
            client.next_handle(),
            priority,
            principal.tenant,
            salt,
            trace,
            replace(facts, place=place, prompt_text=prompt.text),
        )
        for place, (internal_id, prompt, sampling) in enumerate(
            zip(generation.internal_ids, task.prompts, task.sampling, strict=True)
        )
    ]


def _priority(scope: Scope, own: int) -> int:
    given = header(scope, PRIORITY_HEADER.lower().encode())
    if given is None:
        return own
    try:
        priority = int(given)
    except ValueError:
        priority = INT64.stop
    if priority not in INT64:
        raise BadRequest(f"{PRIORITY_HEADER} must be an integer of 64 bits.", param=PRIORITY_HEADER)
    return priority
