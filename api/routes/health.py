"""Probes: /live (the process), /ready (give it traffic), /health (the models), and what goes with them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.app_state import Service, service_of
from api.errors import RedisTrouble, ServiceUnavailable
from api.version import VERSION

router = APIRouter()


@router.get("/live", summary="The process runs")
async def live() -> Response:
    return Response(status_code=200)


@router.get("/ready", summary="New requests are welcome")
async def ready(request: Request) -> Response:
    service = service_of(request)
    if service.draining:
        raise ServiceUnavailable("The server is shutting down.")
    await check(service)
    if refusal := service.client.directory.refusal:
        raise ServiceUnavailable(refusal)
    return Response(status_code=200)


@router.get("/health", summary="Every model has a live engine")
async def health(request: Request) -> Response:
    await check(service_of(request))
    return Response(status_code=200)


@router.get("/ping", summary="As /health")
@router.post("/ping", summary="As /health")
async def ping(request: Request) -> Response:
    return await health(request)


@router.get("/load", summary="Requests that this process has in hand")
async def load(request: Request) -> dict[str, int]:
    return {"server_load": len(service_of(request).observer.open)}


@router.get("/version", summary="Version of the server")
async def version() -> dict[str, str]:
    return {"version": VERSION}


async def check(service: Service) -> None:
    """Raises ServiceUnavailable with the reason. Life of an engine is its heartbeat, which its loop sends only while it gets on."""
    await service.seek_engines()
    if (trouble := service.redis_trouble) is not None:
        raise RedisTrouble(trouble)
    if missing := service.models.missing(service.client):
        raise ServiceUnavailable(f"No live engine for {', '.join(missing)}.")
    if not service.models.names(service.client):
        raise ServiceUnavailable("No live engine.")
