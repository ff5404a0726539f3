"""Server-sent events: chunks written from a prepared frame, keep-alive comments, and an end that always is `[DONE]`.

The format is the WHATWG's (https://html.spec.whatwg.org/multipage/server-sent-events.html): one `data:` line an event, a blank line
behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import ApiError, as_api_error, body_of
from api.http.protocol import EventWriter, event_writer
from api.response.generation import Generation

logger = logging.getLogger("headrace.api")

DONE = b"data: [DONE]\n\n"
COMMENT = ServerSentEvent(comment="keep-alive", sep="\n").encode()
_HEADERS = tuple(EventSourceResponse(iter(())).raw_headers)

encode_json = msgspec.json.Encoder().encode


class ChunkFrame:
    """Everything of a stream's chunks that is the same in all of them, encoded once."""

    def __init__(self, id: str, object: str, created: int, model: str) -> None:
        same = encode_json({"id": id, "object": object, "created": created, "model": model})
        self._head = b"data: " + same[:-1] + b',"choices":['

    def around(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """What stands before and behind the one value that changes from event to event; in the item of the list it is between
        `before` and `after`."""
        return self._head + before, after + b"]}\n\n"

    def chunk(self, choices: bytes, **more: Any) -> bytes:
        """One event. `choices`: the encoded items of the list; `more`: further members of the chunk."""
        tail = b"".join(b',"%b":%b' % (name.encode(), encode_json(value)) for name, value in more.items())
        return b"%b%b]%b}\n\n" % (self._head, choices, tail)


class GenerationStream(Response):
    """An event stream that closes its generation even if the client was gone before the first event was asked for.

    The headers are sse-starlette's. It would run a stream as four tasks, though, with a timeout's scope around each event; this is
    one, and a second that waits for the client to go.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes],
        generation: Generation,
        headers: dict[str, str],
        keep_alive: float,
        on_first: Callable[[EventWriter | None], None] = lambda writer: None,
    ) -> None:
        """`keep_alive`: seconds between comments, 0: none; `on_first` is called once, when the first event has been sent."""
        self.status_code = 200
        self.background = None
        self.raw_headers = [*_HEADERS, *((name.lower().encode(), value.encode()) for name, value in headers.items())]
        self._frames = frames
        self._generation = generation
        self._keep_alive = keep_alive
        self._on_first = on_first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = event_writer(scope)
        watch = asyncio.create_task(self._close_when_gone(receive))
        comments = KeepAlive(self._keep_alive, send, writer)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            comments.start()
            rest = await self._send_events(send, writer)
            await send({"type": "http.response.body", "body": rest + DONE})
        finally:
            comments.stop()
            watch.cancel()
            await self._generation.close()

    async def _send_events(self, send: Send, writer: EventWriter | None) -> bytes:
        """Send the events, but for those at the end behind which nothing is waited for: they are returned, to be one write with the
        end itself. Where an error comes, it is the last of these."""
        rest, is_first = b"", True
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    if self._generation.complete:
                        rest += frame
                        continue
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
                    if is_first:
                        is_first = False
                        self._on_first(writer)
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("a stream failed", extra={"request_id": self._generation.external_id})
            rest += b"data: " + body_of(as_api_error(error)) + b"\n\n"
        return rest

    async def _close_when_gone(self, receive: Receive) -> None:
        """Without the client the frames come to their end by themselves, because the generation does; nobody gets them."""
        while (await receive())["type"] != "http.disconnect":
            pass
        await self._generation.close()


class KeepAlive:
    """Comments of a response that is under way, one each `interval` seconds; 0: none."""

    def __init__(self, interval: float, send: Send, writer: EventWriter | None) -> None:
        self._interval = interval
        self._send = send
        self._writer = writer
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._interval:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._comment)

    def _comment(self) -> None:
        if self._writer is None:
            self._sending = asyncio.ensure_future(self._send({"type": "http.response.body", "body": COMMENT, "more_body": True}))
        elif self._writer.ready:  # where the socket is behind, it has enough to keep it alive
            self._writer.write(COMMENT)
        self.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()
