"""Connections as clients of all kinds use them: offers of other protocols, HTTP/1.0, pipelines, and those that keep us waiting."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from api.http.protocol import MAX_HEADER
from api.http.response_writer import response_writer
from tests.api.http.listening import listening
from tests.waiting import wait_for_async

PATIENCE = 0.5  # seconds that the server under test waits for a client
H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
Talk = Callable[..., Awaitable[str]]


class App:
    """Answers with what it received: whole, in pieces past ASGI (/pieces), or when `go` is set (/wait)."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.left: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = response_writer(scope)
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.append(scope["path"])
                return
            body, more = body + message["body"], message["more_body"]
        writer.when_gone(lambda: self.left.append(scope["path"]))
        if scope["path"] == "/wait":
            await self.go.wait()
        names = sorted(name.decode() for name, _ in scope["headers"])
        told = json.dumps({"method": scope["method"], "path": scope["path"], "body": body.decode(), "headers": names}).encode()
        if scope["path"] == "/pieces":
            await writer.start(send, {"type": "http.response.start", "status": 200, "headers": []})
            assert writer.ready
            writer.write(told[:10])
            writer.write(told[10:])
            await send({"type": "http.response.body"})
        else:
            length = str(len(told)).encode()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
            await send({"type": "http.response.body", "body": told})
        writer.close()


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
async def port(app: App) -> AsyncIterator[int]:
    async with listening(app, PATIENCE) as port:
        yield port


class Socket:
    """A client that says exactly what it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def say(self, *pieces: str) -> Socket:
        for piece in pieces:
            self._writer.write(piece.encode())
            await self._writer.drain()
            await asyncio.sleep(0.01)  # so that each piece is a segment
        return self

    async def head(self) -> str:
        async with asyncio.timeout(10):
            return (await self._reader.readuntil(b"\r\n\r\n")).decode()

    async def answer(self) -> dict[str, Any]:
        """The JSON of an answer with a length."""
        head = await self.head()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        told: dict[str, Any] = json.loads(await self._reader.readexactly(length))
        return {"status": int(head.split()[1]), **told}

    async def rest(self) -> bytes:
        """Everything up to the connection's end."""
        async with asyncio.timeout(10):
            return await self._reader.read()

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
async def connect(port: int) -> AsyncIterator[Callable[[], Awaitable[Socket]]]:
    sockets: list[Socket] = []

    async def connect() -> Socket:
        sockets.append(Socket(*await asyncio.open_connection("127.0.0.1", port)))
        return sockets[-1]

    yield connect
    for socket in sockets:
        socket.close()


Connect = Callable[[], Awaitable[Socket]]


@pytest.mark.parametrize(
    "pieces",
    [
        ("POST /x HTTP/1.1\r\n" + H2C + "Content-Length: 5\r\n\r\nhello",),
        ("POST /x HTTP/1.1\r\n" + H2C + "Content-Length: 5\r\n\r\n", "hello"),
        ("POST /x HTTP/1.1\r\n" + H2C[:40], H2C[40:] + "Content-Length: 5\r\n\r\nhel", "lo"),
        ("POST /x HTTP/1.1\r\n" + H2C + "Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r", "\n2\r\nlo\r\n0\r\n\r\n"),
    ],
)
async def test_an_offer_of_http2_is_passed_over(connect: Connect, pieces: tuple[str, ...]) -> None:
    socket = await (await connect()).say(*pieces)
    answer = await socket.answer()
    assert (answer["status"], answer["method"], answer["path"], answer["body"]) == (200, "POST", "/x", "hello")
    assert not {"connection", "upgrade", "http2-settings"} & set(answer["headers"])
    await socket.say("GET /again HTTP/1.1\r\n\r\n")
    assert (await socket.answer())["path"] == "/again", "the connection stays as it was"


async def test_an_offer_of_http2_and_a_request_behind_it_are_both_answered(connect: Connect) -> None:
    socket = await (await connect()).say(f"GET /one HTTP/1.1\r\n{H2C}\r\nGET /two HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert [(await socket.answer())["path"] for _ in range(2)] == ["/one", "/two"]
    assert await socket.rest() == b""


async def test_an_offer_of_http2_keeps_the_wish_to_close(connect: Connect) -> None:
    socket = await (await connect()).say("GET /x HTTP/1.1\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n")
    assert (await socket.answer())["status"] == 200
    assert await socket.rest() == b""


async def test_a_tunnel_is_refused(connect: Connect) -> None:
    socket = await (await connect()).say("CONNECT host:443 HTTP/1.1\r\nHost: host\r\n\r\n")
    answer = await socket.answer()
    assert (answer["status"], answer["error"]["message"]) == (405, "This server is no proxy.")
    assert await socket.rest() == b""


async def test_pieces_to_http_1_1_are_chunks(connect: Connect) -> None:
    socket = await (await connect()).say("GET /pieces HTTP/1.1\r\n\r\n")
    assert "transfer-encoding: chunked" in await socket.head()
    await socket.say("GET /next HTTP/1.1\r\nConnection: close\r\n\r\n")
    chunks = (await socket.rest()).split(b"HTTP/1.1 200")[0]
    assert chunks.startswith(b"a\r\n") and chunks.endswith(b"\r\n0\r\n\r\n")


async def test_pieces_to_http_1_0_end_with_the_connection(connect: Connect) -> None:
    socket = await (await connect()).say("GET /pieces HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    head = (await socket.head()).lower()
    assert "transfer-encoding" not in head and "content-length" not in head and "connection: close" in head
    assert json.loads(await socket.rest())["path"] == "/pieces"


async def test_bytes_that_are_not_http_are_a_400(connect: Connect) -> None:
    socket = await (await connect()).say("hello?\r\n\r\n")
    answer = await socket.answer()
    assert (answer["status"], answer["error"]["type"]) == (400, "Bad Request")
    assert await socket.rest() == b""


async def test_a_request_is_answered_though_rubbish_follows_it(connect: Connect, app: App) -> None:
    socket = await (await connect()).say("POST /wait HTTP/1.1\r\nContent-Length: 2\r\n\r\nhello, more than was told")
    app.go.set()
    assert (await socket.answer())["body"] == "he"
    assert await socket.rest() == b""


async def test_an_endless_header_is_refused(connect: Connect) -> None:
    socket = await (await connect()).say("GET / HTTP/1.1\r\nX: ", *["x" * (MAX_HEADER // 4)] * 5)
    assert (await socket.answer())["status"] == 431
    assert await socket.rest() == b""


@pytest.mark.parametrize("header", ["GET / HTTP/1.1\r\nX: {}", "GET /{} HTTP/1.1", "GET / HTTP/1.1\r\n" + H2C + "X: {}"])
async def test_a_header_that_comes_whole_has_the_same_limit(connect: Connect, header: str) -> None:
    socket = await (await connect()).say(header.format("x" * (MAX_HEADER + 1)) + "\r\n\r\n")
    assert (await socket.answer())["status"] == 431
    assert await socket.rest() == b""
    socket = await (await connect()).say(header.format("x" * (MAX_HEADER - 1000)) + "\r\n\r\n")
    assert (await socket.answer())["status"] == 200


async def test_trailers_are_no_headers(connect: Connect) -> None:
    request = "POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "2\r\nhe\r\n0\r\nAuthorization: Bearer x\r\n\r\n"
    answer = await (await (await connect()).say(*request)).answer()
    assert (answer["body"], answer["headers"]) == ("he", ["transfer-encoding"])


@pytest.mark.parametrize("said", ["", "\r\n"])
async def test_a_silent_connection_is_closed(connect: Connect, said: str) -> None:
    socket = await connect()
    for _ in range(3):
        await socket.say(said)
    assert await socket.rest() == b""


@pytest.mark.parametrize(
    ("beginning", "drop"),
    [
        ("GET /", "x"),
        ("GET / HTTP/1.1\r\nX: ", "x"),
        ("POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n", "x"),
        ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "1\r\nx\r\n"),
    ],
)
async def test_a_request_that_trickles_is_given_up(connect: Connect, app: App, beginning: str, drop: str) -> None:
    socket = await (await connect()).say(beginning)

    async def trickle() -> None:
        while True:
            await socket.say(drop)

    trickling = asyncio.create_task(trickle())
    answer = await socket.answer()
    assert (answer["status"], answer["error"]["message"]) == (408, f"The request did not come within {PATIENCE} seconds.")
    trickling.cancel()
    await asyncio.gather(trickling, return_exceptions=True)
    assert app.left == (["/"] if beginning.startswith("POST") else []), "the application does not wait for it either"


async def test_a_large_body_may_take_its_time_as_long_as_it_comes(connect: Connect) -> None:
    parts = 4
    socket = await (await connect()).say(f"POST / HTTP/1.1\r\nContent-Length: {parts << 20}\r\n\r\n")
    for _ in range(parts):
        await asyncio.sleep(0.4 * PATIENCE)  # the rest is for a busy machine
        await socket.say("x" * (1 << 20))
    assert len((await socket.answer())["body"]) == parts << 20


async def test_an_answer_may_take_its_time(connect: Connect, app: App) -> None:
    socket = await (await connect()).say("GET /wait HTTP/1.1\r\n\r\n", "GET /ne")  # the next request has begun
    await asyncio.sleep(1.5 * PATIENCE)
    app.go.set()
    assert (await socket.answer())["path"] == "/wait"
    await socket.say("xt HTTP/1.1\r\n\r\n")
    assert (await socket.answer())["path"] == "/next"


async def test_every_request_of_a_lost_connection_learns_of_the_loss(connect: Connect, app: App) -> None:
    """In a pipeline the one under way is not the one that came last."""
    socket = await (await connect()).say("GET /wait HTTP/1.1\r\n\r\nGET /wait HTTP/1.1\r\n\r\n")
    socket.close()
    await wait_for_async(lambda: app.left, "the server has noticed")
    app.go.set()
    assert app.left == ["/wait"]
