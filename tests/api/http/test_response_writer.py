"""What a response may know of its connection: whether the socket takes more, and that the client has left."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.http.protocol import Connection
from api.http.response_writer import ResponseWriter


def make_cycle(version: str = "1.1", **more: Any) -> Any:
    written: list[bytes] = []
    transport = SimpleNamespace(write=written.append, written=written)
    state = {
        "response_complete": False,
        "response_started": True,
        "disconnected": False,
        "scope": {"http_version": version},
        **more,
    }
    return SimpleNamespace(flow=SimpleNamespace(write_paused=False), message_event=asyncio.Event(), transport=transport, **state)


async def started(cycle: Any) -> ResponseWriter:
    async def send(message: Message) -> None:
        cycle.transport.write(b"head")

    writer = ResponseWriter(cycle)
    assert not writer.ready
    await writer.start(send, {"type": "http.response.start"})
    return writer


@pytest.mark.parametrize(("version", "piece"), [("1.1", b"1a\r\n" + b"x" * 26 + b"\r\n"), ("1.0", b"x" * 26)])
async def test_pieces_come_between_the_head_and_the_end(version: str, piece: bytes) -> None:
    cycle = make_cycle(version)
    writer = await started(cycle)
    assert writer.ready
    writer.write(b"x" * 26)
    assert cycle.transport.written == [b"head", piece] and writer.num_bytes == 26
    writer.close()
    assert not writer.ready


async def test_not_while_the_socket_takes_nothing() -> None:
    writer, told = await started(make_cycle()), []
    writer.on_ready = lambda: told.append("ready")
    writer.paused()
    assert not writer.ready and not told
    writer.resumed()
    assert writer.ready and told == ["ready"]
    writer.lost()
    assert not writer.ready
    writer.resumed()
    assert not writer.ready and told == ["ready"]


async def test_a_head_that_fills_the_socket() -> None:
    cycle = make_cycle()
    cycle.flow.write_paused = True
    writer = await started(cycle)
    assert not writer.ready
    writer.resumed()
    assert writer.ready


async def test_a_client_that_left_is_told_at_once_or_later() -> None:
    cycle = make_cycle()
    writer, left = ResponseWriter(cycle), []
    writer.when_gone(lambda: left.append("later"))
    assert not left
    writer.lost()
    writer.when_gone(lambda: left.append("at once"))
    assert left == ["later", "at once"]
    assert writer.gone and not (await started(cycle)).ready


async def test_only_what_is_under_way_is_told_that_the_socket_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    connection: Any = Connection.__new__(Connection)
    running, queued = connection._writers = [await started(make_cycle()), ResponseWriter(make_cycle())]
    told: list[str] = []
    running.on_ready, queued.on_ready = (lambda: told.append("running")), (lambda: told.append("queued"))
    monkeypatch.setattr(HttpToolsProtocol, "resume_writing", lambda self: None)
    connection.resume_writing()
    assert told == ["running"]
