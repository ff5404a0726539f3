"""/v1/responses: create, retrieve, follow, cancel and delete responses, and list their input."""

from __future__ import annotations

from functools import partial
from itertools import dropwhile, islice
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from api.app_state import service_of
from api.continuation import continued_stream
from api.errors import ApiError, BadRequest, NotFound
from api.http.json_route import JsonRoute
from api.http.middleware import HEAD
from api.http.persistence import PARAMETERS
from api.preparation.response import prepare_response
from api.request.response_schemas import ID_PREFIX, ResponsesRequest
from api.response.response_format import ResponseFormat
from api.routes.error_answers import ERRORS
from api.stored_responses import StoredResponse, find_response, past_of, response_now
from api.submit import earlier_answer, generate
from engine.bus import records

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


class CancelTimeout(ApiError):
    """The engine did not confirm in time; the cancellation stands and takes effect when it does."""

    status = 504
    type = "GatewayTimeoutError"


@router.post("/v1/responses", summary="Create a response", openapi_extra=PARAMETERS)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    if (earlier := await earlier_answer(request)) is not None:  # what it went on from may be gone
        return earlier
    past = await past_of(request, body.previous_response_id, body.references)
    return await generate(request, body, partial(prepare_response, past=past), ResponseFormat)


@router.get("/v1/responses/{response_id}", summary="Retrieve a response, or follow its stream")
async def get_response(
    response_id: str,
    request: Request,
    stream: Annotated[bool, Query(description="the events, as they come")] = False,
    starting_after: Annotated[int | None, Query(ge=0, description="sequence_number of the last event received")] = None,
) -> Response:
    stored = await _find(request, response_id)
    if not stream:
        if starting_after is not None:
            raise BadRequest("starting_after needs stream=true.", param="starting_after")
        return await _whole(request, stored)
    if stored.record.state != "ended" and not stored.recalled.generation.grace:
        message = "The stream of a response that is neither in the background nor resumable belongs to the request that began it."
        raise BadRequest(message, param="stream")
    if request.scope.get(HEAD):  # to listen would take the stream from the one that does
        return Response(media_type="text/event-stream")
    return await continued_stream(request, stored.recalled, None if starting_after is None else str(starting_after))


@router.post("/v1/responses/{response_id}/cancel", summary="Cancel a response in the background")
async def cancel_response(response_id: str, request: Request) -> Response:
    stored = await _find(request, response_id)
    if not stored.recalled.generation.task.background:
        raise BadRequest("Cannot cancel a synchronous response.", param="response_id")
    await _abort(request, stored)
    return await _whole(request, await _find(request, ID_PREFIX + stored.record.id))


@router.delete("/v1/responses/{response_id}", summary="Delete a response, and abort it where it runs")
async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
    stored, bus = await _find(request, response_id), service_of(request).bus
    if await bus.run(records.hide(stored.model, stored.record.id)) != "ended":
        await _abort(request, stored)
        await bus.run(records.hide(stored.model, stored.record.id))  # what it has left is dropped
    return {"id": ID_PREFIX + stored.record.id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items", summary="List the items that a response was made from")
async def list_input_items(
    response_id: str,
    request: Request,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(description="id of the last item received")] = None,
) -> dict[str, Any]:
    items = (await _find(request, response_id)).input_items
    if order == "desc":
        items.reverse()
    if after is not None:
        items = list(islice(dropwhile(lambda item: item["id"] != after, items), 1, None))
    data = items[:limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": len(items) > limit}


async def _find(request: Request, response_id: str) -> StoredResponse:
    """Raises NotFound, also for others' responses."""
    stored = await find_response(request, response_id)
    if stored is None:
        raise NotFound(f"Response with id '{response_id[:200]}' not found.", param="response_id")
    return stored


async def _whole(request: Request, stored: StoredResponse) -> Response:
    body = await response_now(service_of(request), stored.recalled, stored.record)
    return Response(body, media_type="application/json")


async def _abort(request: Request, stored: StoredResponse) -> None:
    result = await service_of(request).client.abort(stored.model, stored.record.id)
    if result.found and result.state != "ended":
        raise CancelTimeout("The cancellation was sent, but the engine has not confirmed it yet.")
