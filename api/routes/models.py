"""GET /v1/models: what can be asked for now."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from api.app_state import service_of
from api.errors import NotFound
from api.routes.error_answers import ERRORS
from engine.client.discovery import ModelHandle

router = APIRouter(responses=ERRORS)


@router.get("/v1/models", summary="List the models that have a live engine")
async def list_models(request: Request) -> dict[str, Any]:
    service = service_of(request)
    named = service.models.names(service.client)
    return {"object": "list", "data": [_card(name, handle) for name, handle in named.items()]}


@router.get("/v1/models/{model:path}", summary="Describe one model")
async def get_model(model: str, request: Request) -> dict[str, Any]:
    service = service_of(request)
    handle = service.models.names(service.client).get(model)
    if handle is None:
        raise NotFound(f"The model `{model}` does not exist.", param="model")
    return _card(model, handle)


def _card(name: str, handle: ModelHandle) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(min(engine.started for engine in handle.engines)),
        "owned_by": "headrace",
        "root": handle.name,
        "parent": None,
        "max_model_len": handle.max_model_len,
    }
