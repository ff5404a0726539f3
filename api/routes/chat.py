"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.http.json_route import JsonRoute
from api.http.persistence import PARAMETERS
from api.preparation.chat import prepare_chat
from api.request.schemas import ChatCompletionRequest
from api.response.chat_format import ChatFormat
from api.routes.error_answers import ERRORS
from api.submit import generate

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


@router.post("/v1/chat/completions", summary="Continue a conversation", openapi_extra=PARAMETERS)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    return await generate(request, body, prepare_chat, ChatFormat)
