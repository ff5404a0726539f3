"""The short way of a token: the same bytes in the same order as the long one, whoever waits and whatever fails."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.http.protocol import Connection, EventWriter
from engine.client.request_stream import RequestStream
from engine.protocol import EngineCoreRequest, FinishedOutput, FinishReason, RequestTimes, encode_column
from gpu.plan import SamplingParams
from tests.api.live_server import LiveServer, sse_events


async def _nothing(*arguments: object) -> None:
    """In place of an abort."""


def make_stream() -> RequestStream:
    request = EngineCoreRequest(1, "request", encode_column([1, 2]), SamplingParams(max_tokens=8), "client", 1)
    return RequestStream(request, "model", _nothing, lambda stream: None)


def terminal(num_tokens: int) -> FinishedOutput:
    return FinishedOutput(1, 0, num_tokens, FinishReason.LENGTH, None, 0, RequestTimes())


async def waiting_reader(stream: RequestStream) -> asyncio.Task[Any]:
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)  # it runs until it waits
    return reader


async def test_only_a_waiting_reader_is_passed_over() -> None:
    stream, taken = make_stream(), []
    stream.shortcut = lambda token_id: taken.append(token_id) or True  # type: ignore[func-returns-value]
    assert stream.take_token(0, 0, 10, None), "nobody waits: it is the reader's"
    assert [delta.token_ids for delta in (await anext(stream)).deltas] == [[10]]
    reader = await waiting_reader(stream)
    assert stream.take_token(0, 1, 11, None) and stream.take_token(0, 2, 12, None)
    assert taken == [11, 12] and not reader.done()
    assert stream.take_token(0, 1, 11, None) and taken == [11, 12], "a repetition is dropped"
    assert not stream.take_token(0, 5, 15, None) and taken == [11, 12], "a gap is told"
    stream.take_terminal(terminal(3))
    assert [(delta.token_ids, delta.finished) for delta in (await reader).deltas] == [([], terminal(3))]


async def test_what_the_shortcut_refuses_is_the_readers_and_so_is_all_that_follows() -> None:
    stream, offered = make_stream(), []
    stream.shortcut = lambda token_id: offered.append(token_id) is not None
    reader = await waiting_reader(stream)
    for offset, token_id in enumerate((10, 11, 12)):
        stream.take_token(0, offset, token_id, None)
    assert offered == [10], "the reader is awake then, and has not had the first one yet"
    assert [delta.token_ids for delta in (await reader).deltas] == [[10, 11, 12]]


async def test_a_failing_shortcut_fails_its_own_stream_alone() -> None:
    stream = make_stream()

    def fail(token_id: int) -> bool:
        raise RuntimeError("no text")

    stream.shortcut = fail
    reader = await waiting_reader(stream)
    assert stream.take_token(0, 0, 10, None), "the subscriber goes on"
    with pytest.raises(RuntimeError, match="no text"):
        await reader


@pytest.mark.parametrize(
    "change", ["response_started", "chunked_encoding", "write_paused", "disconnected", "response_complete", "closing"]
)
def test_a_connection_is_written_to_only_while_its_response_is_under_way(change: str) -> None:
    written: list[bytes] = []
    cycle: Any = SimpleNamespace(
        response_started=True,
        chunked_encoding=True,
        flow=SimpleNamespace(write_paused=False),
        disconnected=False,
        response_complete=False,
        transport=SimpleNamespace(write=written.append, is_closing=lambda: False),
    )
    writer = EventWriter(cycle)
    assert writer.ready
    writer.write(b"x" * 26)
    assert written == [b"1a\r\n" + b"x" * 26 + b"\r\n"] and writer.num_bytes == 26
    if change == "closing":
        cycle.transport.is_closing = lambda: True
    else:
        place = cycle.flow if change == "write_paused" else cycle
        setattr(place, change, not getattr(place, change))
    assert not writer.ready


def test_every_response_of_a_lost_connection_is_told() -> None:
    """In a pipeline the one under way is not the one that came last."""
    running, queued, ended = (
        SimpleNamespace(response_complete=complete, disconnected=False, message_event=asyncio.Event())
        for complete in (False, False, True)
    )
    connection: Any = Connection.__new__(Connection)
    connection._unfinished = [ended, running, queued]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HttpToolsProtocol, "connection_lost", lambda self, exc: None)
        connection.connection_lost(None)
    assert [cycle.disconnected for cycle in (running, queued, ended)] == [True, True, False]
    assert running.message_event.is_set() and queued.message_event.is_set()


@pytest.mark.parametrize("chat", [False, True])
def test_the_short_and_the_long_way_look_the_same(null_server: LiveServer, chat: bool) -> None:
    """Usage in every chunk takes the long way; without it the chunks must be the same."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    answers = []
    for options in (None, {"include_usage": True, "continuous_usage_stats": True}):
        body = {**prompt, "stream": True, "seed": 3, "max_tokens": 200, "ignore_eos": True, "stream_options": options}
        answers.append(null_server.http.post(path, json=body, headers={"X-Request-Id": "same"}).text)
    short, long = ([_text(event, chat) for event in sse_events(answer.splitlines())] for answer in answers)
    assert "".join(short) == "".join(long) != ""


def _text(event: Any, chat: bool) -> str:
    if event == "[DONE]" or not event["choices"]:
        return ""
    choice = event["choices"][0]
    text: str = choice["delta"].get("content", "") if chat else choice["text"]
    return text


def test_bytes_that_went_the_short_way_are_counted(null_server: LiveServer) -> None:
    def counted() -> float:
        name = 'http_response_size_bytes_sum{handler="/v1/completions"}'
        lines = null_server.http.get("/metrics").text.splitlines()
        return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0.0)

    before = counted()
    body = {"prompt": "x", "stream": True, "seed": 4, "max_tokens": 100, "ignore_eos": True}
    answer = null_server.http.post("/v1/completions", json=body)
    assert counted() - before == len(answer.content)
    assert json.loads(answer.text.splitlines()[0].removeprefix("data: "))["object"] == "text_completion"
