"""POST /tokenize and /detokenize: the model's tokenizer and chat template, without the model."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from api.app_state import Service, service_of
from api.errors import BadRequest
from api.http.json_route import JsonRoute
from api.model_registry import ServedModel
from api.request.prompts import render_chat, token_strings
from api.request.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from api.request.validation import check_template_fields
from api.routes.chat import template_for

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize", summary="Text or messages to token ids")
async def tokenize(body: TokenizeChatRequest | TokenizeCompletionRequest, request: Request) -> dict[str, Any]:
    service = service_of(request)
    if isinstance(body, TokenizeChatRequest):
        check_template_fields(body)
    model = await service.models.resolve(service.client, body.model)
    token_ids = await service.models.in_thread(_encode, body, model, service)
    strings = token_strings(model.tokenizer, token_ids) if body.return_token_strs else None
    return {"count": len(token_ids), "max_model_len": model.limits.max_model_len, "tokens": token_ids, "token_strs": strings}


@router.post("/detokenize", summary="Token ids to text")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
    service = service_of(request)
    model = await service.models.resolve(service.client, body.model)
    if (largest := max(body.tokens, default=0)) >= model.limits.vocab_size:
        raise BadRequest(f"Token id {largest} is out of vocabulary", param="tokens")
    return {"prompt": await service.models.in_thread(model.tokenizer.decode, body.tokens)}


def _encode(body: TokenizeChatRequest | TokenizeCompletionRequest, model: ServedModel, service: Service) -> list[int]:
    if isinstance(body, TokenizeCompletionRequest):
        return model.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    text = render_chat(body, template_for(body.chat_template, model, service), service.models.template_defaults)
    return model.tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
