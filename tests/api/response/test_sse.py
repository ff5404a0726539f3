"""Events on their way into the socket: written at once, merged while it takes nothing, and always an end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from api.errors import ApiError, GenerationError, body_of
from api.http.response_writer import ResponseWriter
from api.response.answer_format import AnswerFormat
from api.response.output_processor import ChoiceOutput
from api.response.pending_output import OutputBudget
from api.response.sse import COMMENT, EventSink, one_line
from engine.protocol import FinishReason
from tests.api.live_server import LiveServer, sse_events

DONE = b"<done>"


class Writer(ResponseWriter):
    """A socket that takes `room` pieces."""

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.ready = room > 0
        self.pieces: list[bytes] = []

    def write(self, piece: bytes) -> None:
        assert self.ready, "written while the socket takes nothing"
        assert piece, "a chunk of nothing ends the body"
        self.room -= 1
        self.ready = self.room > 0
        self.pieces.append(piece)

    def resume(self, room: int = 1000) -> None:
        self.room = room
        self.ready = True
        self.on_ready()


class Format(AnswerFormat):
    """Events that show an output as it is."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.on_chunks: Callable[[ChoiceOutput], None] = lambda output: None

    def opening(self) -> bytes:
        return b"<open>"

    def chunks(self, output: ChoiceOutput) -> bytes:
        self.on_chunks(output)
        if self.fault is not None:
            raise self.fault
        if not output.text and output.finish_reason is None:
            return b""
        return f"{output.index}:{output.text}{'.' if output.finish_reason is not None else ''};".encode()

    def closing(self) -> bytes:
        return b"<close>" + DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + body_of(error) + b"\n\n" + DONE

    def is_long(self, output: ChoiceOutput) -> bool:
        return output.text == "long"

    def whole(self, choices: list[ChoiceOutput]) -> bytes:
        raise NotImplementedError


class NumberedFormat(Format):
    """Events of single outputs. A client may have the last ones."""

    opens_at_once = tells_each_output = True

    def chunks(self, output: ChoiceOutput) -> bytes:
        return b"".join(super(NumberedFormat, self).chunks(piece) for piece in output.pieces or (output,))

    def closing(self) -> bytes:
        return b""


def say(index: int, text: str, end: bool = False) -> ChoiceOutput:
    return ChoiceOutput(index, text, [1], finish_reason=FinishReason.STOP if end else None)


async def opened(sink: EventSink, writer: Writer) -> asyncio.Task[None]:
    written = asyncio.create_task(sink.written(writer))
    await asyncio.sleep(0)
    return written


async def test_each_output_that_shows_something_is_written_at_once() -> None:
    sink, writer = EventSink(Format(), OutputBudget(1 << 20)), Writer()
    last = await opened(sink, writer)
    for text in ("a", "", "b"):
        sink.put(say(0, text))
    assert writer.pieces == [b"<open>0:a;", b"0:b;"]
    sink.put(say(0, "", end=True))
    sink.end()
    await last
    assert writer.pieces[2:] == [b"0:.;", b"<close>" + DONE]


async def test_a_format_may_open_at_once_and_tell_merged_outputs_one_by_one() -> None:
    sink, writer = EventSink(NumberedFormat(), OutputBudget(1 << 20)), Writer(room=2)
    last = await opened(sink, writer)
    assert writer.pieces == [b"<open>"]
    for text in "abcd":
        sink.put(say(0, text))
    assert writer.pieces[1:] == [b"0:a;"]
    writer.resume()
    sink.end()
    await last
    assert writer.pieces[2:] == [b"0:b;0:c;0:d;"]


async def test_outputs_before_the_responses_head_are_merged() -> None:
    """The engine may be faster than Redis' answer to `enqueue`."""
    sink, writer = EventSink(Format(), OutputBudget(1 << 20)), Writer()
    for output in (say(1, "a"), say(0, "x"), say(1, "b", end=True)):
        sink.put(output)
    sink.end()
    last = await opened(sink, writer)
    await last
    assert writer.pieces == [b"<open>1:ab.;", b"0:x;", b"<close>" + DONE]


async def test_a_slow_client_gets_one_event_a_choice_and_the_order_stays() -> None:
    sink, writer = EventSink(Format(), OutputBudget(1 << 20)), Writer(room=1)
    last = await opened(sink, writer)
    for text in "abc":
        sink.put(say(0, text))
        sink.put(say(1, text.upper()))
    assert writer.pieces == [b"<open>0:a;"]
    writer.resume(room=1)
    sink.put(say(0, "d"))
    assert writer.pieces[1:] == [b"1:ABC;"]
    sink.put(say(1, "D"))
    sink.end()
    assert not last.done(), "the client has not had all"
    writer.resume(room=2)
    assert (writer.pieces[2:], last.done()) == ([b"0:bcd;", b"1:D;"], False)
    writer.resume()
    await last
    assert writer.pieces[4:] == [b"<close>" + DONE]


async def test_a_long_output_is_made_on_a_thread_and_the_order_stays() -> None:
    format = Format()
    made_by = []
    format.on_chunks = lambda output: made_by.append((output.text, threading.current_thread() is threading.main_thread()))
    sink, writer = EventSink(format, OutputBudget(1 << 20)), Writer()
    last = await opened(sink, writer)
    for text in ("long", "a", "b"):
        sink.put(say(0, text))
    sink.keep_alive()
    assert writer.pieces == [], "nothing overtakes it"
    sink.put(say(1, "c"))
    sink.end()
    await last
    assert writer.pieces == [b"<open>0:long;", b"0:ab;", b"1:c;", b"<close>" + DONE]
    assert made_by == [("long", False), ("ab", True), ("c", True)]


async def test_a_long_output_that_fails_ends_the_stream_with_an_error() -> None:
    format = Format()
    format.fault = ValueError("secret")
    sink, writer = EventSink(format, OutputBudget(1 << 20)), Writer()
    last = await opened(sink, writer)
    sink.put(say(0, "long"))
    await last
    assert b"Internal server error" in writer.pieces[0] and b"secret" not in writer.pieces[0] and writer.pieces[0].endswith(DONE)


async def test_a_client_that_leaves_during_a_long_output_gets_no_more() -> None:
    sink, writer = EventSink(Format(), OutputBudget(1 << 20)), Writer()
    last = await opened(sink, writer)
    sink.put(say(0, "long"))
    writer.ready = False
    sink.close()
    await last
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))
    assert writer.pieces == []


async def test_an_early_failure_is_the_first_event() -> None:
    sink, writer = EventSink(Format(), OutputBudget(1 << 20)), Writer()
    last = await opened(sink, writer)
    sink.end(GenerationError("broken"))
    await last
    event, done = b"".join(writer.pieces).split(b"\n\n", 1)
    assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == "broken"
    assert done == DONE


async def test_a_failure_comes_behind_what_was_merged() -> None:
    sink, writer = EventSink(Format(), OutputBudget(1 << 20)), Writer(room=0)
    last = await opened(sink, writer)
    sink.put(say(0, "a"))
    sink.end(GenerationError("broken"))
    writer.resume()
    await last
    assert writer.pieces[0] == b"<open>0:a;" and b"broken" in writer.pieces[1]


async def test_a_failure_of_merged_outputs_ends_the_stream_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    format = Format()
    sink, writer = EventSink(format, OutputBudget(1 << 20)), Writer(room=0)
    last = await opened(sink, writer)
    sink.put(say(0, "a"))
    format.fault = RuntimeError("secret")
    writer.resume()
    await last
    sink.put(say(0, "b"))
    sink.end()
    (ending,) = writer.pieces
    assert b"Internal server error." in ending and ending.endswith(DONE)
    assert "secret" in caplog.text


async def test_a_client_that_left_is_not_waited_for() -> None:
    sink, writer = EventSink(Format(), OutputBudget(1 << 20)), Writer(room=0)
    last = await opened(sink, writer)
    sink.put(say(0, "a"))
    sink.close()
    await last
    assert not writer.pieces


async def test_comments_only_while_nothing_waits_to_be_written() -> None:
    sink, writer = EventSink(Format(), OutputBudget(1 << 20)), Writer(room=1)
    sink.keep_alive()
    last = await opened(sink, writer)
    sink.keep_alive()
    sink.keep_alive()
    assert writer.pieces == [COMMENT]
    sink.put(say(0, "a"))
    writer.ready = True
    sink.keep_alive()
    assert writer.pieces == [COMMENT], "it has enough to keep it alive"
    last.cancel()


LINE_ENDS = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1dh\x1ei\rj\nk\u00e9\U0001f600"


def test_no_text_ends_a_line_of_an_event(null_server: LiveServer) -> None:
    """Readers split lines by Unicode's rules, or by the format's."""
    body = {"prompt": LINE_ENDS, "echo": True, "max_tokens": 1, "stream": True}
    text = null_server.http.post("/v1/completions", json=body).content.decode()
    assert text.splitlines() == text.split("\n")[:-1]
    events = sse_events(text.splitlines())
    assert "".join(event["choices"][0]["text"] for event in events[:-1]).startswith(LINE_ENDS)


def test_errors_in_events_end_no_line_either() -> None:
    error = GenerationError(LINE_ENDS)
    sink = one_line(b"data: " + body_of(error) + b"\n\n").decode()
    assert len(sink.splitlines()) == 2
    assert json.loads(sink.removeprefix("data: "))["error"]["message"] == LINE_ENDS


@pytest.mark.parametrize("chat", [False, True])
def test_usage_in_every_event_changes_no_text(null_server: LiveServer, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    texts = []
    for options in (None, {"include_usage": True, "continuous_usage_stats": True}):
        body = {**prompt, "stream": True, "seed": 3, "max_tokens": 200, "ignore_eos": True, "stream_options": options}
        answer = null_server.http.post(path, json=body, headers={"X-Request-Id": "same"})
        texts.append("".join(_text(event, chat) for event in sse_events(answer.text.split("\n"))))
    assert texts[0] == texts[1] != ""


def _text(event: Any, chat: bool) -> str:
    if event == "[DONE]" or not event["choices"]:
        return ""
    choice = event["choices"][0]
    text: str = choice["delta"].get("content", "") if chat else choice["text"]
    return text


def test_bytes_of_events_are_counted(null_server: LiveServer) -> None:
    def counted() -> float:
        name = 'http_response_size_bytes_sum{handler="/v1/completions"}'
        lines = null_server.http.get("/metrics").text.splitlines()
        return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0.0)

    before = counted()
    body = {"prompt": "x", "stream": True, "seed": 4, "max_tokens": 100, "ignore_eos": True}
    answer = null_server.http.post("/v1/completions", json=body)
    assert counted() - before == len(answer.content)


class CountedFormat(Format):
    """Its last events say how many outputs were shown before, and fail where the last of them was not."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[ChoiceOutput] = []
        self.on_chunks = self.shown.append

    def closing(self) -> bytes:
        if not self.shown or self.shown[-1].finish_reason is None:
            raise AssertionError("the end was not shown yet")
        return b"<close behind %d>" % len(self.shown)


async def test_the_last_events_are_made_behind_the_outputs_that_waited() -> None:
    sink, writer = EventSink(CountedFormat(), OutputBudget(1 << 20)), Writer(room=1)
    last = await opened(sink, writer)
    sink.put(say(0, "a"))
    sink.put(say(0, "b", end=True))
    sink.end()
    writer.resume()
    await last
    assert writer.pieces == [b"<open>0:a;", b"0:b.;", b"<close behind 2>"]


async def test_a_client_that_leaves_while_outputs_wait_fails_nothing() -> None:
    sink, writer = EventSink(CountedFormat(), OutputBudget(1 << 20)), Writer(room=1)
    last = await opened(sink, writer)
    sink.put(say(0, "a"))
    writer.ready = False
    sink.put(say(0, "b", end=True))
    sink.end()
    sink.close()
    await last
    assert writer.pieces == [b"<open>0:a;"]


async def test_last_events_that_cannot_be_made_become_an_error() -> None:
    sink, writer = EventSink(CountedFormat(), OutputBudget(1 << 20)), Writer()
    last = await opened(sink, writer)
    sink.put(say(0, "a"))
    sink.end()
    await last
    assert writer.pieces[0] == b"<open>0:a;"
    assert b'"code":500' in writer.pieces[1]
