"""Errors as Anthropic's clients expect them (https://docs.anthropic.com/en/api/errors), on the routes that speak its API.

Whatever refuses such a request writes OpenAI's body. A layer around keys, limits of bodies and routes turns it into Anthropic's, so
that none of these need know of it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.headers import route_path

PATHS = "/v1/messages"  # and what begins so
ID_HEADER = b"request-id"  # that the clients show with their errors
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(status: int, message: str, request_id: str) -> bytes:
    """The JSON of a body or of a stream's error event."""
    type = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": type, "message": message}, "request_id": request_id})


class AnthropicErrors:
    """ASGI layer. Beside the errors' bodies it gives each response the header that has the request's id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and route_path(scope).startswith(PATHS):
            send = _Answer(scope["state"]["request_id"], send).send
        await self._app(scope, receive, send)


class _Answer:
    """One response on its way out. An error's body is held until it is whole."""

    def __init__(self, request_id: str, send: Send) -> None:
        self._request_id = request_id
        self._send = send
        self._start: Message | None = None  # of an error
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (ID_HEADER, self._request_id.encode())]
            if message["status"] >= 400:
                self._start = message
                return
        elif self._start is not None and message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if message.get("more_body", False):
                return
            start, self._start = self._start, None
            body = self._translated(start["status"])
            kept = [pair for pair in start["headers"] if pair[0] != b"content-length"]
            start["headers"] = [*kept, (b"content-length", str(len(body)).encode())]
            await self._send(start)
            message = {"type": "http.response.body", "body": body}
        await self._send(message)

    def _translated(self, status: int) -> bytes:
        try:
            told: Any = msgspec.json.decode(self._body)
            return anthropic_error(status, told["error"]["message"], self._request_id)
        except (msgspec.DecodeError, KeyError, TypeError):  # no error of this server's, such as an empty body
            return self._body
