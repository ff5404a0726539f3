"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.app_state import service_of
from api.http.json_route import JsonRoute
from api.http.persistence import PARAMETERS
from api.preparation.messages import ENDPOINT, counted, prepare_message
from api.request.messages_schemas import CountTokensRequest, MessagesRequest
from api.response.messages_format import MessagesFormat
from api.routes.error_answers import MESSAGES_ERRORS
from api.submit import generate

router = APIRouter(route_class=JsonRoute, responses=MESSAGES_ERRORS)


@router.post(ENDPOINT, summary="Continue a conversation, in Anthropic's form", openapi_extra=PARAMETERS)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    return await generate(request, body, prepare_message, MessagesFormat)


@router.post(f"{ENDPOINT}/count_tokens", summary="Count the tokens of a conversation")
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    service = service_of(request)
    model = await service.resolve(body.model)
    return Response(await service.prepare(request, counted, body, model), media_type="application/json")
