"""POST /tokenize and /detokenize: the model's tokenizer and chat template, without the model."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.app_state import service_of
from api.http.json_route import JsonRoute
from api.preparation.tokenization import detokenized, tokenized
from api.request.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest

router = APIRouter(route_class=JsonRoute)
JSON = "application/json"


@router.post("/tokenize", summary="Text or messages to token ids")
async def tokenize(body: TokenizeChatRequest | TokenizeCompletionRequest, request: Request) -> Response:
    service = service_of(request)
    model = await service.models.resolve(service.client, body.model)
    return Response(await service.prepare(request, tokenized, body, model), media_type=JSON)


@router.post("/detokenize", summary="Token ids to text")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    service = service_of(request)
    model = await service.models.resolve(service.client, body.model)
    return Response(await service.prepare(request, detokenized, body, model), media_type=JSON)
