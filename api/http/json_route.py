"""A route of FastAPI's whose body is parsed once, from its bytes into its model.

FastAPI's own handler makes Python objects of the body, a model of these, and solves dependencies that no endpoint here has. This
one is for endpoints that take a `body` and the `request`. FastAPI documents them as it does all routes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from api.errors import InvalidRequest, json_response
from api.http.headers import JSON_TYPE, media_type

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # RFC 8259 allows to ignore it; some stacks send it
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it is what access logs and metrics show


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if self.body_field is None:
            return super().get_route_handler()
        endpoint = self.endpoint
        model: TypeAdapter[Any] = TypeAdapter(get_type_hints(endpoint)["body"])

        async def handle(request: Request) -> Response:
            _demand_json(request)
            try:
                body = model.validate_json((await request.body()).removeprefix(BYTE_ORDER_MARK))
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            except ValidationError as error:
                raise InvalidRequest.of_body(error) from None
            answer = await endpoint(body, request)
            return answer if isinstance(answer, Response) else json_response(answer)

        return handle


def _demand_json(request: Request) -> None:
    """Bodies are JSON and say so; anything else is a 400, as with vLLM."""
    found = media_type(request.scope)
    if found != JSON_TYPE:
        message = "Unsupported Media Type: Only 'application/json' is allowed"
        fault = {"type": "media_type", "loc": ("header", "content-type"), "msg": message, "input": found}
        raise InvalidRequest([fault])
