"""From a body to its response: preparation, admission, enqueue, refusals. No 200 goes out before `enqueue` has answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Scope

from api.app_state import Service, principal_of, service_of
from api.errors import RETRY_AFTER, ApiError, BadRequest, ServiceUnavailable
from api.http.auth import Principal, derive_cache_salt
from api.http.headers import header
from api.http.request_ids import INTERNAL_ID_HEADER, REQUEST_ID_HEADER, body_id, header_id, internal_id_header, internal_ids
from api.http.response_writer import response_writer
from api.model_files import ServedModel
from api.model_registry import NO_ENGINE
from api.preparation.rules import RequestRules
from api.preparation.task import Task
from api.request.schemas import SamplingFields
from api.response.answer import WholeAnswer, whole_response
from api.response.chunk_format import AnswerFormat
from api.response.generation import Generation
from api.response.sse import EventSink, EventStream
from engine.bus.enqueue import Refused
from engine.client.client import AsyncClient
from engine.config import ApiConfig
from engine.protocol import PROTOCOL_VERSION, EngineCoreRequest, RequestFacts, encode_column

B = TypeVar("B", bound=SamplingFields)

PRIORITY_HEADER = "X-Vllm-Priority"
TRACE_HEADERS = ("traceparent", "tracestate")
INT64 = range(-(2**63), 2**63)


async def generate(
    request: Request,
    body: B,
    prepare: Callable[[B, ServedModel, RequestRules], Task],
    format: Callable[[Generation, ApiConfig], AnswerFormat],
    in_place: bool = False,
) -> Response:
    """Prepare `body`, enqueue it and answer in `format`. `in_place`: preparing it takes less time than a thread costs.

    Raises ApiError and BusUnavailable where nothing was enqueued, and where the engine gave up before the response began.
    """
    service = service_of(request)
    _admit(service)
    model = await service.models.resolve(service.client, body.model)
    task = prepare(body, model, service.rules) if in_place else await service.prepare(request, prepare, body, model)
    generation = _make_generation(request, task, body.request_id)
    return await _answer(request, generation, format(generation, service.config))


def _admit(service: Service) -> None:
    """Raises ServiceUnavailable while the server stops."""
    if service.draining:
        raise ServiceUnavailable("The server is shutting down.", headers=RETRY_AFTER)


def _make_generation(request: Request, task: Task, given_id: str | None) -> Generation:
    """The generation that will answer `request`; nothing of it is enqueued yet. `given_id`: the body's. Raises BadRequest."""
    own: str = request.state.request_id
    external = header_id(request.scope) or body_id(given_id) or own
    ids = internal_ids(external, len(task.prompts))
    return Generation(task, external, ids, time.time(), principal_of(request).tenant, service_of(request).observer)


async def _answer(request: Request, generation: Generation, format: AnswerFormat) -> Response:
    """Enqueue the prompts of `generation` and make the response: events as they come, or all in one piece."""
    headers, writer = _answer_headers(generation), response_writer(request.scope)
    if generation.task.stream:
        events = generation.sink = EventSink(format, service_of(request).output_budget)
        try:
            await _submit(request, generation)
        except BaseException:
            events.close()
            raise
        return EventStream(generation, events, headers, service_of(request).config.sse_keep_alive_interval)
    whole = generation.sink = WholeAnswer(generation.task.num_choices)
    await _submit(request, generation)
    return await whole_response(generation, whole, format, writer, headers)


async def _submit(request: Request, generation: Generation) -> None:
    """Enqueue all prompts of `generation` or none."""
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
        num_prompts=len(task.prompts),
        answer=task.answer,
    )
    requests = _engine_requests(request.scope, principal_of(request), service.client, generation, facts)
    try:
        streams = await service.client.add(task.model.canonical_name, requests, generation.runs, service.limits)
    except Refused as refusal:
        service.metrics.refused(task.model.first_name, refusal.reason)
        raise _refusal_error(refusal) from refusal
    generation.begin(streams)


def _answer_headers(generation: Generation) -> dict[str, str]:
    return {REQUEST_ID_HEADER: generation.external_id, INTERNAL_ID_HEADER: internal_id_header(generation.internal_ids)}


def _engine_requests(
    scope: Scope, principal: Principal, client: AsyncClient, generation: Generation, facts: RequestFacts
) -> list[EngineCoreRequest]:
    """`facts`: all but what differs from prompt to prompt."""
    task = generation.task
    priority = _priority(scope, task.priority)
    if not task.model.takes_priorities:
        priority = 0
    trace = {name: value for name in TRACE_HEADERS if (value := header(scope, name.encode())) is not None}
    salt = derive_cache_salt(principal, task.cache_salt)
    return [
        EngineCoreRequest(
            PROTOCOL_VERSION,
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


def _refusal_error(refusal: Refused) -> ApiError:
    match refusal.reason:
        case "max_num_queued_reqs" | "max_num_queued_tokens":
            message = f"The server is overloaded: {refusal}. Try again later."
        case "no_engine":
            message = NO_ENGINE
        case "memory":
            message = "The request queue is out of memory. Try again later."
        case "aborted":
            return BadRequest("The request was aborted before it began.")
        case _:
            message = "The request could not be queued. Try again."
    return ServiceUnavailable(message, headers=RETRY_AFTER)
