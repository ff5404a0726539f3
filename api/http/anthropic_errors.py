"""Errors as Anthropic's clients expect them (https://docs.anthropic.com/en/api/errors), on the routes that speak its API.

Whatever refuses such a request writes OpenAI's body. A layer around all others turns it into Anthropic's, so that none of them need
know of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.headers import route_path
from api.http.request_ids import ASGI_ID_HEADER

PATH = "/v1/messages"  # and what lies below
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
    """ASGI layer around all others. Beside the errors' bodies it gives each response the header that has the request's id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and speaks_anthropic(route_path(scope)):
            send = _Answer(scope, send).send
        await self._app(scope, receive, send)


def speaks_anthropic(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


class _Answer:
    """One response on its way out. The head of an error waits for the body, which has another length afterwards."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._start: Message | None = None  # of an error
        self._request_id = ""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            self._request_id = self._id(headers)
            message["headers"] = [*headers, (ID_HEADER, self._request_id.encode())]
            if message["status"] >= 400:
                self._start = message
                return
        elif self._start is not None and message["type"] == "http.response.body":
            start, self._start = self._start, None
            body = self._translated(start["status"], message.get("body", b""))  # whole: errors have short ones
            kept = [pair for pair in start["headers"] if pair[0] != b"content-length"]
            start["headers"] = [*kept, (b"content-length", str(len(body)).encode())]
            await self._send(start)
            message["body"] = body
        await self._send(message)

    def _id(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The response's own where it has one: a body may name it."""
        given = next((value for name, value in headers if name == ASGI_ID_HEADER), None)
        return given.decode() if given is not None else str(self._scope["state"]["request_id"])

    def _translated(self, status: int, body: bytes) -> bytes:
        try:
            told: Any = msgspec.json.decode(body)
            return anthropic_error(status, told["error"]["message"], self._request_id)
        except (msgspec.DecodeError, KeyError, TypeError):  # no error of this server's, such as an empty body
            return body
