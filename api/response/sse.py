"""Server-sent events on their way to a client: written at once or merged, with keep-alive comments between them.

The format is the WHATWG's (https://html.spec.whatwg.org/multipage/server-sent-events.html): one `data:` line an event, a blank line
behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import ApiError, GenerationError, as_api_error
from api.http.response_writer import ResponseWriter, response_writer
from api.response.answer_format import AnswerFormat
from api.response.generation import Generation
from api.response.output_processor import ChoiceOutput
from api.response.pending_output import OutputBudget, PendingOutput

logger = logging.getLogger("headrace.api")

_LINE_ENDS = [(end.encode(), b"\\u%04x" % ord(end)) for end in "\u0085\u2028\u2029"]
Estimate = Callable[[int], float | None]  # from requests that wait before one to seconds, where those can be told
COMMENT = ServerSentEvent(comment="keep-alive", sep="\n").encode()
_HEADERS = tuple(pair for pair in EventSourceResponse(iter(())).raw_headers if pair[0] != b"connection")  # that the server says


class EventSink:
    """Writes a generation's outputs as events of its response.

    While the response's head has not gone out, or the socket takes no more, outputs are merged, one a choice. So they are while the
    events of a long output, such as an echo with its logprobs, are made on a thread. A slow client delays no other client, and is
    dropped when too much of its output waits.
    """

    def __init__(self, format: AnswerFormat, budget: OutputBudget) -> None:
        self._format = format
        self._writer: ResponseWriter | None = None
        self._begun = False  # the opening events were made
        self._making: asyncio.Task[None] | None = None  # the events of a long output
        self._pending = PendingOutput(budget, self._drop, format.tells_each_output)  # what could not be written yet
        self._last: Callable[[], bytes] | None = None  # makes the last events, once no output follows; they depend on those before
        self._written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # What the generation calls

    def put(self, output: ChoiceOutput) -> None:
        writer = self._writer
        if self._last is not None:
            return
        if writer is not None and self._is_free(writer):
            self._write(writer, output)
        else:
            self._pending.add(output)

    def end(self, error: ApiError | None = None) -> None:
        if self._last is None:
            self._last = self._format.closing if error is None else partial(self._format.failure, error)
            self._flush()

    # What the response calls

    async def written(self, writer: ResponseWriter) -> None:
        """Write to `writer`, which has started. Returns when all has been written, or the client has left."""
        self._writer = writer
        writer.on_ready = self._flush
        if self._format.opens_at_once and writer.ready:
            self._write_events(writer, self._opening())
        self._flush()
        await self._written

    def close(self) -> None:
        """The client has left, or has all: nothing more is written."""
        self._pending.close()
        if not self._written.done():
            self._written.set_result(None)

    def keep_alive(self, comment: bytes = COMMENT) -> None:
        """Write a comment. Where the socket is behind, it has enough to keep it alive."""
        if self._writer is not None and self._is_free(self._writer):
            self._writer.write(comment)

    def _is_free(self, writer: ResponseWriter) -> bool:
        """The socket takes what is written now, and no output waits before it."""
        return writer.ready and self._making is None and not self._pending.parts

    def _flush(self) -> None:
        writer = self._writer
        if writer is None:
            return
        try:
            while self._pending.parts and writer.ready and self._making is None:
                self._write(writer, self._pending.pop())
        except Exception as error:
            self._fail(error)
        if self._last is not None and self._is_free(writer) and not self._written.done():
            try:
                events = self._last()
            except Exception as error:
                self._fail(error)
                events = self._last()
            self._write_events(writer, events)
            self._written.set_result(None)

    def _drop(self, num_bytes: int) -> None:
        """The client reads too slowly."""
        self._end_with(GenerationError("The client reads too slowly."))
        if self._writer is not None:
            self._writer.drop("memory", f"let {num_bytes} bytes of output wait, when all clients had too much waiting")

    def _fail(self, error: Exception) -> None:
        logger.error("a stream failed", exc_info=error)
        self._end_with(as_api_error(error))

    def _end_with(self, error: ApiError) -> None:
        self._pending.clear()
        self._last = partial(self._format.failure, error)

    def _write(self, writer: ResponseWriter, output: ChoiceOutput) -> None:
        opening = self._opening()  # not before, as a rule: an early failure is to be the first event
        if self._format.is_long(output):
            self._making = asyncio.create_task(self._write_long(writer, output, opening))
        else:
            self._write_events(writer, opening + self._format.chunks(output))

    def _opening(self) -> bytes:
        """The opening events, once."""
        begun, self._begun = self._begun, True
        return b"" if begun else self._format.opening()

    async def _write_long(self, writer: ResponseWriter, output: ChoiceOutput, opening: bytes) -> None:
        try:
            events = opening + await run_in_threadpool(self._format.chunks, output)
            if writer.ready:  # else the client has left: nothing was written meanwhile
                self._write_events(writer, events)
        except Exception as error:
            self._fail(error)
        finally:
            self._making = None
            self._flush()

    def _write_events(self, writer: ResponseWriter, events: bytes) -> None:
        if events:  # a chunk of nothing would end the body
            writer.write(events if events.isascii() else one_line(events))


def one_line(events: bytes) -> bytes:
    """`events`, whose JSON is spelled so that no reader takes a character of a text for the end of a line.

    The format knows CR and LF alone, which JSON escapes anyway, with all else below U+0020. Readers that split by Unicode's rules,
    as Python's `splitlines` does, end lines at U+0085, U+2028 and U+2029 too.
    """
    for spelled, escaped in _LINE_ENDS:
        events = events.replace(spelled, escaped)
    return events


def queue_comment(num_before: int, wait: float | None) -> bytes:
    """What a stream says while its request waits."""
    estimate = "" if wait is None else f", about {wait:.0f} s"
    return ServerSentEvent(comment=f"queue position {num_before}{estimate}", sep="\n").encode()


class EventStream(Response):
    """The response of a generation whose sink writes events. It always closes the generation.

    The headers are sse-starlette's. It would run a stream as four tasks, though, with a timeout's scope around each event.
    """

    def __init__(
        self,
        generation: Generation,
        sink: EventSink,
        headers: dict[str, str],
        comment_seconds: float,
        estimate: Estimate | None = None,
    ) -> None:
        """`comment_seconds`: between the comments that keep the connection alive; 0: none. `estimate`: of the wait in the queue."""
        self.status_code = 200
        self.background = None
        self.raw_headers = [*_HEADERS, *((name.lower().encode(), value.encode()) for name, value in headers.items())]
        self._generation = generation
        self._sink = sink
        self._comment_seconds = comment_seconds
        self._comments: asyncio.TimerHandle | None = None
        self._estimate = estimate or (lambda num_before: None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = response_writer(scope)
        try:
            writer.when_gone(self.leave)
            await writer.start(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._comment_later()
            await self._sink.written(writer)
            await send({"type": "http.response.body", "body": b""})
        finally:
            writer.close()
            if self._comments is not None:
                self._comments.cancel()
            self.leave()

    def leave(self) -> None:
        """Nobody wants the response any more."""
        self._generation.close()
        self._generation.release()
        self._sink.close()

    def _comment_later(self) -> None:
        if self._comment_seconds:
            self._comments = asyncio.get_running_loop().call_later(self._comment_seconds, self._comment)

    def _comment(self) -> None:
        num_before = self._generation.num_before
        self._sink.keep_alive(COMMENT if num_before is None else queue_comment(num_before, self._estimate(num_before)))
        self._comment_later()
