"""Calls into the engines, for operators. They affect the requests of all tenants, so they need an admin key."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from api.app_state import principal_of, service_of
from api.errors import Forbidden, NotFound, ServiceUnavailable
from api.model_registry import NO_ENGINE
from api.routes.error_answers import ERRORS
from engine.protocol import EngineInfo

router = APIRouter(responses=ERRORS)
RESET_SECONDS = 30.0  # that an engine may take to answer: it does so between two steps


@router.post("/reset_prefix_cache", summary="Forget the prefix cache")
async def reset_prefix_cache(
    request: Request, model: Annotated[str | None, Query(description="one model's engines; default: all engines")] = None
) -> dict[str, Any]:
    """An engine whose requests hold blocks forgets nothing: its `success` is false."""
    service = service_of(request)
    if not principal_of(request).admin:
        raise Forbidden("This needs an admin key.")
    engines = service.client.directory.engines
    if model is not None:
        handle = service.models.names(service.client).get(model)
        if handle is None:
            raise NotFound(f"The model `{model}` does not exist.", param="model")
        engines = handle.engines
    if not engines:
        raise ServiceUnavailable(NO_ENGINE)

    async def reset(engine: EngineInfo) -> dict[str, Any]:
        try:
            reply = await service.client.utility(engine, "reset_prefix_cache", timeout=RESET_SECONDS)
        except TimeoutError:
            return _told(engine, False, "The engine did not answer in time.")
        return _told(engine, bool(reply.value), None if reply.value else reply.error or "Requests hold blocks.")

    results = await asyncio.gather(*map(reset, engines))
    return {"success": all(result["success"] for result in results), "engines": results}


def _told(engine: EngineInfo, success: bool, error: str | None) -> dict[str, Any]:
    return {"model": engine.model, "engine": engine.slot, "success": success, "error": error}
