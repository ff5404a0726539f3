"""The direct way of a completion request: from the outer layers to its endpoint, past FastAPI.

FastAPI's way to an endpoint costs a third of a whole request: nine layers, a search for the route, dependencies, a body that turns
into objects of Python and then into a model. An ordinary request needs a look at its path and one pass over its body. Whatever is
out of the ordinary, every body that is not valid above all, takes FastAPI's way as if there were no other, so that nothing is
decided twice: FastAPI says what is wrong, and documents the routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, get_type_hints

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ApiError, as_api_error, error_response
from api.headers import JSON_TYPE, header, media_type
from engine.bus import BusUnavailable


class DirectRoutes:
    """ASGI layer right before `app`. `routers`: of endpoints that take a `body`, which is a model, and the `request`, and return a
    response; `max_bytes`: of a body."""

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter], max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._routes = {route.path: _Direct(route) for router in routers for route in router.routes if isinstance(route, APIRoute)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if direct is None or not self._is_ordinary(scope):
            await self._app(scope, receive, send)
            return
        messages = await _whole_body(receive)
        body = direct.read(messages)
        if body is None:
            await self._app(scope, _replay(messages, receive), send)
            return
        scope["route"] = direct.route
        try:
            response = await direct.endpoint(body, Request(scope, receive, send))
        except (ApiError, BusUnavailable) as error:
            response = error_response(as_api_error(error))
        except Exception as error:
            await error_response(as_api_error(error))(scope, receive, send)
            raise
        await response(scope, receive, send)

    def _is_ordinary(self, scope: Scope) -> bool:
        """JSON that says so, and is short enough."""
        length = header(scope, b"content-length") or ""
        return media_type(scope) == JSON_TYPE and length.isdecimal() and int(length) <= self._max_bytes


class _Direct:
    """One route."""

    def __init__(self, route: APIRoute) -> None:
        self.route = route
        self.endpoint: Callable[[Any, Request], Awaitable[Response]] = route.endpoint
        self._model: type[BaseModel] = get_type_hints(route.endpoint)["body"]

    def read(self, messages: list[Message]) -> BaseModel | None:
        """None where the body is not valid, or the client left before its end."""
        if messages[-1]["type"] != "http.request":
            return None
        try:
            return self._model.model_validate_json(b"".join([message.get("body", b"") for message in messages]))
        except ValidationError:
            return None


async def _whole_body(receive: Receive) -> list[Message]:
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """`receive`, with the messages that were taken from it before all others."""
    rest = iter(messages)

    async def again() -> Message:
        message = next(rest, None)
        return message if message is not None else await receive()

    return again
