"""POST /tokenize and /detokenize: the model's tokenizer and chat template, without the model."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from api.app_state import service_of
from api.errors import NotFound
from api.http.json_route import JsonRoute
from api.preparation.tokenization import detokenized, tokenized
from api.request.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from api.routes.error_answers import ERRORS

router = APIRouter(route_class=JsonRoute, responses=ERRORS)
JSON = "application/json"


@router.post("/tokenize", summary="Text or messages to token ids")
async def tokenize(body: TokenizeChatRequest | TokenizeCompletionRequest, request: Request) -> Response:
    service = service_of(request)
    model = await service.resolve(body.model)
    return Response(await service.prepare(request, tokenized, body, model), media_type=JSON)


@router.post("/detokenize", summary="Token ids to text")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    service = service_of(request)
    model = await service.resolve(body.model)
    return Response(await service.prepare(request, detokenized, body, model), media_type=JSON)


@router.get("/tokenizer_info", summary="The tokenizer's configuration and the chat template")
async def tokenizer_info(request: Request, model: Annotated[str | None, Query()] = None) -> dict[str, Any]:
    """Only with --enable-tokenizer-info-endpoint."""
    service = service_of(request)
    if not service.config.enable_tokenizer_info_endpoint:
        raise NotFound("This server was not started with --enable-tokenizer-info-endpoint.")
    files = (await service.resolve(model)).files
    configuration = files.bundle.tokenizer_config
    known = {"bos_token": files.bundle.bos_token, "eos_token": files.bundle.eos_token}
    return {**known, **configuration, "chat_template": files.template_source or files.bundle.chat_template}
