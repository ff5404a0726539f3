"""The application: routes, layers and life of one API server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.concurrency import run_in_threadpool
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.app_state import Service, service_of
from api.errors import install_error_handlers, on_api_error
from api.http.anthropic_errors import AnthropicErrors
from api.http.auth import Authentication, check_exposure
from api.http.middleware import BodyLimit, Methods, RequestContext
from api.routes import chat, completions, engines, health, messages, models, requests, responses, tokenize, usage
from api.version import VERSION
from engine.config import ApiConfig, RedisConfig

ROUTES = (chat, completions, responses, messages, models, tokenize, requests, usage, engines, health)
DESCRIPTION = "OpenAI-compatible inference on Redis streams."

metrics_router = APIRouter()


@metrics_router.get("/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    service = service_of(request)
    await service.look()
    service.metrics.settle()
    return Response(await run_in_threadpool(service.metrics.render), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class Application(FastAPI):
    """`state.service` is `service`. The layers that everything passes stand in the place of FastAPI's own, which would limit bodies
    and look for telemetry."""

    def __init__(self, service: Service, **more: Any) -> None:
        super().__init__(**more)
        self.state.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self.state.service.config.root_path.rstrip("/")  # the server's would be put in front of each path
        await super().__call__(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        service: Service = self.state.service
        config = service.config
        app: ASGIApp = AsyncExitStackMiddleware(self.router)  # FastAPI's handlers keep in it what a request opens
        app = ExceptionMiddleware(app, handlers=self.exception_handlers)
        app = ServerErrorMiddleware(app, handler=on_api_error)
        app = BodyLimit(app, config.max_request_bytes)
        app = Authentication(app, service.keys)
        app = Methods(app, self.routes)
        if config.allowed_origins:
            app = CORSMiddleware(app, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"])
        return AnthropicErrors(RequestContext(app, service.metrics, config.enable_request_id_headers))


def create_app(config: ApiConfig, redis_config: RedisConfig) -> Application:
    """An application that connects to Redis when it starts up; its `Service` is `app.state.service`.

    Raises ConfigurationError for settings that cannot be, and where it would be open to the network without keys.
    """
    check_exposure(config)
    service = Service(config, redis_config)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    app = Application(
        service,
        title="headrace",
        version=VERSION,
        description=DESCRIPTION,
        lifespan=life,
        redirect_slashes=False,
        openapi_url=None if config.disable_fastapi_docs else "/openapi.json",  # without it there are no pages either
    )
    for router in (*(module.router for module in ROUTES), metrics_router):
        app.router.routes += router.routes  # `include_router` would put a router of its own before each of them
    install_error_handlers(app)
    return app
