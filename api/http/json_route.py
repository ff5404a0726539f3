"""A route of FastAPI's whose body is parsed once, from its bytes into its model.

FastAPI's own handler makes Python objects of the body, a model of these, and solves dependencies that no endpoint here has. This
one is for endpoints that take a `body` and the `request`. FastAPI documents them as it does all routes. Instead of a large body
they get its head, while the body waits for them in a reader process (`api.preparation`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from api.errors import InvalidRequest, json_response
from api.http.headers import JSON_TYPE, media_type
from api.http.persistence import body_hash, idempotency_key
from api.preparation.readers import Readers

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # RFC 8259 allows to ignore it; some stacks send it
LARGE_BYTES = 64 * 1024  # parsed in 15 ms at the worst; longer bodies are read in another process
CLIENT_CLOSED_REQUEST = 499  # no client reads it; access logs and metrics show it


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if self.body_field is None:
            return super().get_route_handler()
        schema = get_type_hints(self.endpoint)["body"]
        adapter: TypeAdapter[Any] = TypeAdapter(schema)

        async def handle(request: Request) -> Response:
            _demand_json(request)
            try:
                raw = await _raw_body(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            if idempotency_key(request.scope):
                request.state.body_hash = await _hash(request, raw)
            if len(raw) <= LARGE_BYTES:
                try:
                    body = adapter.validate_json(raw)
                except ValidationError as error:
                    raise InvalidRequest.of_body(error) from None
                return await self._respond(body, request)
            readers: Readers = request.app.state.service.readers
            held = await readers.read(schema, raw)
            del raw  # a stream may go on for long
            with held:
                request.state.held_body = held
                return await self._respond(held.head, request)

        return handle

    async def _respond(self, body: Any, request: Request) -> Response:
        answer = await self.endpoint(body, request)
        return answer if isinstance(answer, Response) else json_response(answer)


async def _hash(request: Request, raw: bytes) -> str:
    if len(raw) <= LARGE_BYTES:
        return body_hash(request.scope, raw)
    return await run_in_threadpool(body_hash, request.scope, raw)


async def _raw_body(request: Request) -> bytes:
    """The body. `request.body()` would keep it for as long as the request."""
    return b"".join([piece async for piece in request.stream()]).removeprefix(BYTE_ORDER_MARK)


def _demand_json(request: Request) -> None:
    """Bodies are JSON and say so; anything else is a 400, as with vLLM."""
    found = media_type(request.scope)
    if found != JSON_TYPE:
        message = "Unsupported Media Type: Only 'application/json' is allowed"
        fault = {"type": "media_type", "loc": ("header", "content-type"), "msg": message, "input": found}
        raise InvalidRequest([fault])
