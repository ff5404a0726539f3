"""Server-sent events: chunks written from a prepared frame, keep-alive comments, and an end that always is `[DONE]`.

The format is the WHATWG's (https://html.spec.whatwg.org/multipage/server-sent-events.html): one `data:` line an event, a blank line
behind.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.types import Receive, Scope, Send

from api.errors import ApiError, as_api_error, body_of
from api.generation import Generation

logger = logging.getLogger("headrace.api")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = ServerSentEvent(comment="keep-alive", sep="\n")

# The server ends its streams itself (api.server): without this every stream is cut the moment a signal arrives.
AppStatus.enable_automatic_graceful_drain = False

encode_json = msgspec.json.encode


class ChunkFrame:
    """Everything of a stream's chunks that is the same in all of them, encoded once."""

    def __init__(self, id: str, object: str, created: int, model: str) -> None:
        same = encode_json({"id": id, "object": object, "created": created, "model": model})
        self._head = b"data: " + same[:-1] + b',"choices":['

    def chunk(self, choices: bytes, **more: Any) -> bytes:
        """One event. `choices`: the encoded items of the list; `more`: further members of the chunk."""
        tail = b"".join(b',"%b":%b' % (name.encode(), encode_json(value)) for name, value in more.items())
        return b"".join((self._head, choices, b"]", tail, b"}\n\n"))


async def events(frames: AsyncGenerator[bytes], generation: Generation) -> AsyncIterator[bytes]:
    """`frames`, an error as the last event where one comes, `[DONE]`. The generation is closed at the end, whatever the end is."""
    try:
        async with aclosing(frames):
            async for frame in frames:
                yield frame
    except Exception as error:
        if not isinstance(error, ApiError):
            logger.exception("a stream failed", extra={"request_id": generation.external_id})
        yield b"data: " + body_of(as_api_error(error)) + b"\n\n"
    finally:
        await generation.close()
    yield DONE


class GenerationStream(EventSourceResponse):
    """An event stream that closes its generation even if the client was gone before the first event was asked for.

    sse-starlette watches for the client's disconnect while nothing is sent, and cancels the frames then.
    """

    def __init__(self, frames: AsyncGenerator[bytes], generation: Generation, headers: dict[str, str], keep_alive: float) -> None:
        super().__init__(
            events(frames, generation), headers=headers, ping=keep_alive, ping_message_factory=lambda: KEEP_ALIVE, sep="\n"
        )
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._generation.close()
