"""A response's way into its socket past ASGI, and the news that its client has left.

An ASGI server is sent to with `await`, through all layers of the application, and each event of each stream would wake a task for
that. A response that is under way needs none of it while its socket takes what it is given.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Message, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "headrace.response"  # of ASGI scopes


def _nothing() -> None:
    pass


class ResponseWriter:
    """Writes a body of unknown length between its head and its end, which go through ASGI. Never waits, but in `start`.

    `ready`: the head has gone out, and the socket takes more; `on_ready` is called when it does so again.
    """

    __slots__ = (
        "_chunked",
        "_cycle",
        "_drop",
        "_on_gone",
        "_under_way",
        "_write",
        "num_bytes",
        "on_ready",
        "ready",
        "request_received",
    )

    def __init__(self, cycle: RequestResponseCycle, drop: Callable[[str, str], None]) -> None:
        """`drop(reason, said)` cuts the connection: a label for the metric, and what the client did."""
        self.num_bytes = 0
        self.ready = False
        self.request_received = False  # whole
        self.on_ready: Callable[[], None] = _nothing
        self._on_gone: Callable[[], None] = _nothing
        self._cycle = cycle
        self._drop = drop
        self._write = cycle.transport.write
        self._chunked = cycle.scope["http_version"] != "1.0"
        self._under_way = False

    @property
    def gone(self) -> bool:
        """The client has left."""
        return self._cycle.disconnected

    @property
    def request_id(self) -> str:
        """As the response's header says it; "" before that is known."""
        given: str = self._cycle.scope.get("state", {}).get("request_id", "")
        return given

    @property
    def started(self) -> bool:
        return self._cycle.response_started

    @property
    def complete(self) -> bool:
        return self._cycle.response_complete

    async def start(self, send: Send, head: Message) -> None:
        """Send the response's head, which has no Content-Length; pieces may be written from then on."""
        if not self._chunked:  # HTTP/1.0 knows no chunks: the connection's end is the body's
            self._cycle.chunked_encoding = False
        await send(head)
        self._under_way = not self.gone
        self.ready = self._under_way and not self._cycle.flow.write_paused

    def write(self, piece: bytes) -> None:
        """One piece of the body, only when `ready`: a chunk (RFC 9112, section 7.1), or to HTTP/1.0 its bytes alone."""
        num_bytes = len(piece)
        self.num_bytes += num_bytes
        self._write(b"%x\r\n%b\r\n" % (num_bytes, piece) if self._chunked else piece)

    def drop(self, reason: str, said: str) -> None:
        """Hang up on the client, which reads too slowly. `lost` follows."""
        self._drop(reason, said)

    def close(self) -> None:
        """Nothing is written and no callback is called any more. The scope, which is the cycle's, knows this no more."""
        self._under_way = self.ready = False
        self.on_ready = self._on_gone = _nothing
        self._cycle.scope["extensions"].pop(EXTENSION, None)

    def when_gone(self, told: Callable[[], None]) -> None:
        """`told` is called when the client leaves before the response's end; now, where it has left."""
        self._on_gone = told
        if self.gone:
            told()

    # What the connection tells

    def is_last(self) -> None:
        """The connection ends behind this response."""
        self._cycle.keep_alive = False

    def lost(self) -> None:
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        self._under_way = self.ready = False
        self._on_gone()

    def paused(self) -> None:
        self.ready = False

    def resumed(self) -> None:
        if self._under_way:
            self.ready = True
            self.on_ready()


def response_writer(scope: Scope) -> ResponseWriter:
    """The writer of the response to the request of `scope`. Raises KeyError where another server runs the application."""
    writer: ResponseWriter = scope["extensions"][EXTENSION]
    return writer
