"""/v1/requests: list, inspect and cancel requests by id. A key shows its own tenant's, an admin key all.

Cancelling answers when the request's blocks are free, with the tokens made so far. Listings show counts and times, no text.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from msgspec import Raw
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.admission import engines_of
from api.app_state import Service, principal_of, service_of
from api.continuation import continued_stream, recall, stored_answer, visible_requests
from api.errors import ApiError, NotFound, json_response
from api.http.middleware import HEAD
from api.routes.error_answers import ERRORS
from api.stored_responses import may_be_shown
from engine.bus import records
from engine.bus.queue_place import num_before
from engine.bus.records import Found, RecordView
from engine.client.admission import estimated_wait

router = APIRouter(responses=ERRORS)

MARKS = ("enqueued", "received", "scheduled", "first_token", "last_token", "finished")


class AbortTimeout(ApiError):
    """The engine did not confirm in time; the abort stands and takes effect when it does."""

    status = 504
    type = "GatewayTimeoutError"


@router.get("/v1/requests", summary="List requests, newest first")
async def list_requests(
    request: Request,
    state: Annotated[Literal["live", "ended", "all"], Query(description="live: queued or running")] = "live",
    model: Annotated[str | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Response:
    service, principal = service_of(request), principal_of(request)
    tenant = None if principal.admin else principal.tenant
    found: list[RecordView] = []
    for name in service.models.known(service.client, model):
        if state != "ended":
            running = await service.bus.run(records.live_requests(name, limit, tenant))
            found += running
        if state != "live":
            ended = await service.bus.run(records.ended_requests(name, limit, tenant))
            found += ended
    visible = [record for record in found if principal.may_see(record.tenant)]
    return await run_in_threadpool(_listing, visible, limit)


@router.get("/v1/requests/{request_id}", summary="Inspect a request")
async def get_request(request_id: str, request: Request) -> Response:
    """The record; and, once the request has ended, the whole answer as its endpoint gives it."""
    service = service_of(request)
    model, record = await _find(request, request_id)
    answer = await _answer(service, model, record) if record.state == "ended" else None
    place = await _place(service, model, record) if record.state == "queued" else {}
    return json_response({**_as_json(record), **place, "answer": None if answer is None else Raw(answer)})


async def _place(service: Service, model: str, record: RecordView) -> dict[str, Any]:
    """Where a request stands that waits."""
    (number,) = await service.bus.run(num_before(model, [record.entry]))
    wait = None if number is None else estimated_wait(number, engines_of(service.client, model))
    return {"queue_position": number, "estimated_wait": wait}


async def _answer(service: Service, model: str, record: RecordView) -> bytes | None:
    """JSON. None: there is no answer, or it is not kept."""
    try:
        recalled = await recall(service, model, record)
        return await stored_answer(service, recalled) if may_be_shown(record, recalled) else None
    except ApiError:
        return None


@router.get("/v1/requests/{request_id}/stream", summary="Continue a stream, or follow a request from its first token")
async def continue_stream(
    request_id: str,
    request: Request,
    starting_after: Annotated[
        str | None, Query(description="id of the last event received; Last-Event-ID counts before it")
    ] = None,
) -> Response:
    service = service_of(request)
    model, record = await _find(request, request_id)
    if request.scope.get(HEAD):  # to listen would take the stream from the one that does
        return Response(media_type="text/event-stream")
    recalled = await recall(service, model, record)
    if not may_be_shown(record, recalled):
        raise _unknown(request_id)
    return await continued_stream(request, recalled, starting_after)


@router.post("/v1/requests/{request_id}/cancel", summary="Abort a request")
@router.delete("/v1/requests/{request_id}", summary="Abort a request")
async def cancel_request(request_id: str, request: Request) -> dict[str, Any]:
    service = service_of(request)
    model, record = await _find(request, request_id)
    result = await service.client.abort(model, record.id)
    if not result.found:
        raise _unknown(request_id)
    if result.state != "ended":
        raise AbortTimeout("The abort was sent, but the engine has not confirmed it yet.")
    return {**_as_json(result.record or record), "cancelled": record.state != "ended", "output_tokens": result.num_tokens}


async def _find(request: Request, request_id: str) -> Found:
    """Canonical model and newest record of an internal, external or answer id. Raises NotFound, also for others' requests."""
    visible = await visible_requests(request, request_id)
    if not visible:
        raise _unknown(request_id)
    return max(visible, key=lambda each: (each.record.state != "ended", each.record.enqueued))


def _listing(found: list[RecordView], limit: int) -> Response:
    """On a thread: ten thousand records take some time."""
    found.sort(key=lambda record: record.enqueued, reverse=True)
    return json_response({"object": "list", "data": [_as_json(record) for record in found[:limit]]})


def _unknown(request_id: str) -> NotFound:
    return NotFound(f"No request with id '{request_id[:200]}' is known.", param="request_id")


def _as_json(record: RecordView) -> dict[str, Any]:
    return {
        "object": "request",
        "id": record.id,
        "external_id": record.external_id,
        "state": record.state,
        "finish_reason": record.reason or None,
        "error": record.error or None,
        "model": record.model,
        "tenant": record.tenant,
        "endpoint": record.endpoint,
        "stream": record.stream,
        "priority": record.priority,
        "service_tier": record.tier or None,
        "n": record.n,
        "prompt_tokens": record.prompt_tokens,
        "max_tokens": record.max_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "engine": record.engine or None,
        "preemptions": record.preemptions,
        "times": {mark: getattr(record, mark) or None for mark in MARKS},
    }
