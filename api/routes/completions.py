"""POST /v1/completions: one prompt or a list of them, text or token ids, scoring included."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.http.json_route import JsonRoute
from api.http.persistence import PARAMETERS
from api.preparation.completion import is_light, prepare_completion
from api.request.schemas import CompletionRequest
from api.response.completion_format import CompletionFormat
from api.routes.error_answers import ERRORS
from api.submit import generate

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


@router.post("/v1/completions", summary="Continue a text", openapi_extra=PARAMETERS)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    return await generate(request, body, prepare_completion, CompletionFormat, in_place=is_light(body))
