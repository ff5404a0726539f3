"""Plain ASGI layers around all routes: request id and counters, the last catch, the size of bodies. Streams pass untouched."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress

from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ApiError, PayloadTooLarge, error_response
from api.http.headers import header, route_path
from api.http.request_ids import ASGI_ID_HEADER, header_id, random_digits
from api.http.response_writer import EXTENSION, ResponseWriter
from api.metrics.metrics import Metrics

logger = logging.getLogger("headrace.api")

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
UNCOUNTED_PATHS = frozenset({"/metrics", "/health", "/live", "/ready", "/load", "/ping", "/version"})
LINGER_SECONDS = 2.0  # that a client which sends too much is listened to behind its answer
UNKNOWN_ROUTE = "none"  # label of what no route answers: paths that clients make up would be labels without end


class RequestContext:
    """Outermost: gives each response its X-Request-Id, counts it, and turns what nothing else caught into a 500 without details."""

    def __init__(self, app: ASGIApp, metrics: Metrics, id_header: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._id_header = id_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send, self._id_header)
        self._metrics.in_flight.inc()
        started = time.perf_counter()
        try:
            await self._app(scope, receive, exchange.send)
        except Exception:
            logger.exception("a request failed", extra={"request_id": exchange.request_id})
            if not exchange.status:
                await error_response(ApiError("Internal server error."))(scope, receive, exchange.send)
        finally:
            self._metrics.in_flight.dec()
            if route_path(scope) not in UNCOUNTED_PATHS:
                self._count(scope, exchange, time.perf_counter() - started)

    def _count(self, scope: Scope, exchange: _Exchange, seconds: float) -> None:
        route = scope.get("route")
        handler = getattr(route, "path", UNKNOWN_ROUTE)
        method = scope["method"] if route is not None else UNKNOWN_ROUTE
        metrics = self._metrics
        metrics.http_requests.labels(handler, method, f"{exchange.status // 100}xx").inc()
        metrics.http_duration.labels(handler, method).observe(seconds)
        length = header(scope, b"content-length") or ""
        metrics.http_request_size.labels(handler).observe(int(length) if length.isdecimal() else 0)
        metrics.http_response_size.labels(handler).observe(exchange.num_bytes)


class _Exchange:
    """The facts about one response as it goes out. `status` is 0 until it begins."""

    def __init__(self, scope: Scope, send: Send, id_header: bool) -> None:
        self.request_id = header_id(scope) or random_digits(32)
        self.status = 0
        self._num_bytes = 0
        self._writer: ResponseWriter | None = scope.get("extensions", {}).get(EXTENSION)
        self._send = send
        self._id_header = id_header
        scope.setdefault("state", {})["request_id"] = self.request_id

    @property
    def num_bytes(self) -> int:
        """Bytes of the response's body so far."""
        return self._num_bytes + (self._writer.num_bytes if self._writer is not None else 0)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = self._with_id(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self._num_bytes += len(message.get("body", b""))
        await self._send(message)

    def _with_id(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The response's own id where it has one; none where none is wanted."""
        given = [pair for pair in headers if pair[0] == ASGI_ID_HEADER]
        others = [pair for pair in headers if pair[0] != ASGI_ID_HEADER]
        if not self._id_header:
            return others
        return others + (given or [(ASGI_ID_HEADER, self.request_id.encode())])


HEAD = "headrace.head"  # of ASGI scopes: the request is a HEAD, which a route sees as a GET


class Methods:
    """Answers HEAD like GET, without the body, and OPTIONS with the methods of a path, of `*` (the server) with those of all paths.
    `routes`: of the application."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._routes = list(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"] if scope["type"] == "http" else ""
        if method == "HEAD":  # the server, which has the outer scope, sends no body
            inner = {**scope, "method": "GET", HEAD: True}
            await self._app(inner, receive, send)
            scope["route"] = inner.get("route")
        elif method == "OPTIONS" and (allowed := self._allowed(scope)):
            await Response(status_code=204, headers={"Allow": ", ".join(allowed)})(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> list[str]:
        """Methods of the scope's path; none where there is no such path."""
        is_server = scope["path"] == "*"  # the server as a whole: RFC 9110, section 9.3.7
        found = [method for method in METHODS if is_server or any(self._has(route, scope, method) for route in self._routes)]
        return [*found, *(["HEAD"] if "GET" in found else []), "OPTIONS"] if found else []

    @staticmethod
    def _has(route: BaseRoute, scope: Scope, method: str) -> bool:
        return route.matches({**scope, "method": method})[0] is Match.FULL


class BodyLimit:
    """Refuses bodies over `max_bytes` with 413: at once by their Content-Length, else as soon as they are too long.

    The rest is read and dropped for a while: a connection that is closed while data arrives is reset, and the answer is lost.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = f"The request body is larger than {self._max_bytes} bytes."
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            received = await receive()
            num_bytes += len(received.get("body", b""))
            if num_bytes > self._max_bytes:
                raise PayloadTooLarge(refusal, headers={"Connection": "close"})
            return received

        async def lingering(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if num_bytes > self._max_bytes and is_last:
                await send({**message, "more_body": True})
                await _drop_rest(receive)
                message = {"type": "http.response.body"}
            await send(message)

        length = header(scope, b"content-length") or ""
        if length.isdecimal() and int(length) > self._max_bytes:
            num_bytes = int(length)
            error = PayloadTooLarge(refusal, headers={"Connection": "close"})
            await error_response(error)(scope, receive, lingering)
        else:
            await self._app(scope, limited, lingering)


async def _drop_rest(receive: Receive) -> None:
    """Returns at the body's end, or the client's, or when it takes too long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (await receive()).get("more_body", False):
                pass
