"""An HTTP connection that takes a stream's events without a coroutine: the end of the short way of a token (api.response.shortcut).

An ASGI server is sent to with `await`, through all layers of the application, and each event of each stream would wake a task for
that. Nothing of it is needed while a response is under way and its socket takes what it is given.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION = "headrace.events"  # of ASGI scopes


class EventWriter:
    """Writes pieces of one chunked response (RFC 9112, section 7.1) and never waits: what is not `ready` is to be sent as usual."""

    __slots__ = ("_cycle", "_flow", "_write", "num_bytes")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.num_bytes = 0
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def ready(self) -> bool:
        """The response has begun, in chunks, its client is there and not behind."""
        cycle = self._cycle
        return (
            cycle.response_started
            and cycle.chunked_encoding is True
            and not self._flow.write_paused
            and not cycle.disconnected
            and not cycle.transport.is_closing()
            and not cycle.response_complete
        )

    def write(self, before: bytes, middle: bytes = b"", after: bytes = b"") -> None:
        """One piece out of three, put together once. Only when `ready`."""
        num_bytes = len(before) + len(middle) + len(after)
        self.num_bytes += num_bytes
        self._write(b"%x\r\n%b%b%b\r\n" % (num_bytes, before, middle, after))


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, whose scopes have an `EventWriter`, and which tells every response that its client is gone."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._unfinished: list[RequestResponseCycle] = []

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells the request that came last; before it, in a pipeline, others may be under way."""
        super().connection_lost(exc)
        for cycle in self._unfinished:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._unfinished.clear()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._unfinished = [cycle for cycle in self._unfinished if not cycle.response_complete]
        if self.cycle is not None:
            self._unfinished.append(self.cycle)
        if self.cycle is not None and self.cycle.scope is self.scope:  # not where another protocol takes over
            scope: Scope = self.scope  # type: ignore[assignment]
            scope["extensions"] = {EXTENSION: EventWriter(self.cycle)}


def event_writer(scope: Scope) -> EventWriter | None:
    """None where another server than `Connection`'s runs the application."""
    writer: EventWriter | None = scope.get("extensions", {}).get(EXTENSION)
    return writer
