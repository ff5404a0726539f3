"""GET /v1/usage: what requests that ended have used, by day (UTC) and model. A key sees its own tenant's, an admin key all."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from api.app_state import principal_of, service_of
from api.routes.error_answers import ERRORS
from engine.bus import usage
from engine.bus.usage import UsageRow

router = APIRouter(responses=ERRORS)


@router.get("/v1/usage", summary="Requests and tokens by day and model")
async def get_usage(
    request: Request,
    since: Annotated[date | None, Query(description="first day (UTC), YYYY-MM-DD")] = None,
    until: Annotated[date | None, Query(description="last day")] = None,
    model: Annotated[str | None, Query(description="default: all models")] = None,
) -> dict[str, Any]:
    service, principal = service_of(request), principal_of(request)
    found: list[UsageRow] = []
    for name in service.models.known(service.client, model):
        found += await service.bus.run(usage.usage_rows(name, since, until))
    rows = sorted(found, key=lambda row: (row.day, row.model, row.tenant))
    return {"object": "list", "data": [_as_json(row) for row in rows if principal.may_see(row.tenant)]}


def _as_json(row: UsageRow) -> dict[str, Any]:
    totals = row.totals
    return {
        "object": "usage",
        "date": row.day.isoformat(),
        "model": row.model,
        "tenant": row.tenant,
        "requests": totals.requests,
        "prompt_tokens": totals.prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "output_tokens": totals.output_tokens,
        "finish_reasons": totals.reasons,
    }
