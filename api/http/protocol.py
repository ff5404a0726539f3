"""The server's end of an HTTP connection: uvicorn's, and what it lacks.

- Scopes have a `ResponseWriter`, and every response is told when its client leaves.
- A client that keeps the server waiting for its request, or that takes nothing of its answer, is hung up on after a bounded time.
- An offer to go on in another protocol, such as HTTP/2 (h2c), is passed over, as RFC 9110, section 7.8, allows.
- What is no HTTP gets an answer in the shape of all errors.
- A header has a largest size, and fields behind a body (trailers) are no headers, which RFC 9110, section 6.5.1, forbids to merge.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum
from typing import Any

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from api.errors import phrase_error
from api.http.response_writer import EXTENSION, ResponseWriter
from api.http.stalls import StallWatch

logger = logging.getLogger("headrace.api")

MAX_HEADER = 1 << 16  # bytes of a request's target and its header fields
BODY_PART = 1 << 20  # bytes of a body that must come within the same time as a header
HOP_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings"})


class Phase(Enum):
    """The phase of the client's side. New: it has sent nothing yet. Idle: it has sent its requests whole."""

    NEW, HEADER, BODY, IDLE = range(4)


class HeaderTooLargeError(Exception):
    """Ends the parser's work from within one of its callbacks."""


class Connection(HttpToolsProtocol):
    """`request_timeout`: seconds in which a client must begin its first request, send a header, send each MiB of a body.
    `stall_timeout`: seconds after which one is hung up on that takes nothing of what waits for it; 0: never. `dropped` is told why.
    `is_leaving`: the server stops, so that each response is the last on its connection.
    """

    def __init__(
        self,
        *arguments: Any,
        request_timeout: float,
        stall_timeout: float = 0.0,
        dropped: Callable[[str], None] = lambda reason: None,
        is_leaving: Callable[[], bool] = lambda: False,
        **more: Any,
    ) -> None:
        super().__init__(*arguments, **more)
        self._request_timeout = request_timeout
        self._stall_timeout = stall_timeout
        self._dropped = dropped
        self._is_leaving = is_leaving
        self._writers: list[ResponseWriter] = []  # of requests without a whole response; several in a pipeline, in their order
        self._phase = Phase.NEW
        self._phase_since = 0.0  # the loop's time; of a body, since when its part is waited for
        self._phase_bytes = 0  # that have come of a header behind its first packet, or of a body's part
        self._watch: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """The client sends a request, or waits for an answer."""
        return self._phase in (Phase.HEADER, Phase.BODY) or any(not writer.complete for writer in self._writers)

    def leave(self) -> None:
        """The server stops: responses that have not begun say that the connection ends behind them."""
        for writer in self._writers:
            if not writer.started:
                writer.is_last()

    # The client's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin(Phase.NEW)
        self._watch = self.loop.call_later(self._request_timeout, self._look)
        self._stalls = StallWatch(transport, self._stall_timeout, self._hang_up_stalled)

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells the request that came last; before it, in a pipeline, others may be under way."""
        super().connection_lost(exc)
        if self._watch is not None:
            self._watch.cancel()
        self._stalls.stop()
        for writer in self._writers:
            if not writer.complete:
                writer.lost()
        self._writers.clear()

    def data_received(self, data: bytes) -> None:
        if self.parser is None:  # nothing more is read here
            return
        header = self.headers if self._phase is Phase.HEADER else None
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._pass_over_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, HeaderTooLargeError):
                self._refuse_header()
            else:
                self._refuse(400, "This is no HTTP request.")
        else:
            if self._phase is Phase.HEADER and self.headers is header:  # none of it is whole: the parser tells nothing yet
                self._phase_bytes += len(data)
                if self._phase_bytes > MAX_HEADER:
                    self._refuse_header()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalls.start()
        for writer in self._writers:
            writer.paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stalls.stop()
        for writer in self._writers:
            writer.resumed()

    # The parser's side

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self._begin(Phase.HEADER)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is Phase.HEADER:  # else a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER:
            raise HeaderTooLargeError
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        self._begin(Phase.BODY)
        self._writers = [writer for writer in self._writers if not writer.complete]
        writer = ResponseWriter(self.cycle, self._drop)
        self._writers.append(writer)
        if self._is_leaving():
            writer.is_last()
        scope: Scope = self.scope  # type: ignore[assignment]
        scope["extensions"] = {EXTENSION: writer}

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._phase_bytes += len(body)
        if self._phase_bytes >= BODY_PART:
            self._begin(Phase.BODY)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._begin(Phase.IDLE)
        self._writers[-1].request_received = True

    def _pass_over_upgrade(self, rest: bytes) -> None:
        """Read the request again as if it had no offer: the parser would leave what follows the header to the other protocol."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self._refuse(405, "This server is no proxy.")
            return
        kept = [(name, value) for name, value in self.headers if name not in HOP_HEADERS]
        if not self.parser.should_keep_alive():
            kept.append((b"connection", b"close"))
        head = b"%b %b HTTP/%b\r\n" % (method, self.url, version)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.data_received(head + b"".join(b"%b: %b\r\n" % pair for pair in kept) + b"\r\n" + rest)

    # Clients that keep us waiting

    def timeout_keep_alive_handler(self) -> None:
        if self._phase is Phase.IDLE:
            super().timeout_keep_alive_handler()

    def _begin(self, phase: Phase) -> None:
        self._phase = phase
        self._phase_since = self.loop.time()
        self._phase_bytes = 0

    @property
    def _answering(self) -> list[ResponseWriter]:
        """The responses that are not complete, of requests that came whole."""
        return [writer for writer in self._writers if writer.request_received and not writer.complete]

    def _look(self) -> None:
        """Hang up where the client has been waited for too long; else look again when it will have been."""
        if self.transport.is_closing():  # the connection ends once the client has taken what waits for it
            self._stalls.start()
        if self._phase is Phase.IDLE or self.flow.read_paused or self._answering:  # it is not the client that is waited for
            left = self._request_timeout
        else:
            left = self._phase_since + self._request_timeout - self.loop.time()
        if left > 0:
            self._watch = self.loop.call_later(left, self._look)
        elif self._phase is not Phase.NEW and not any(writer.started for writer in self._writers):
            self._refuse(408, f"The request did not come within {self._request_timeout:g} seconds.")
        else:
            self.transport.close()

    def _hang_up_stalled(self, num_bytes: int) -> None:
        self._drop("stalled", f"took nothing of {num_bytes} bytes for {self._stall_timeout:g} seconds")

    def _drop(self, reason: str, said: str) -> None:
        """Cut the connection at once, with all that waits for the client: it reads too slowly."""
        ids = [writer.request_id for writer in self._writers if not writer.complete]
        logger.warning("hung up on a client that %s", said, extra={"request_id": ", ".join(ids)} if ids else None)
        self._dropped(reason)
        self.transport.abort()

    def _refuse_header(self) -> None:
        self._refuse(431, f"The request's header is larger than {MAX_HEADER} bytes.")

    def _refuse(self, status: int, message: str) -> None:
        """The last answer on this connection, or none where others are under way: then it ends behind those."""
        self.parser = None  # type: ignore[assignment]  # as uvicorn does at a connection's end
        if self._answering:
            self._answering[-1].is_last()
            return
        body = phrase_error(status, message)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
