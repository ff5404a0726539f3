"""What a response may know of its connection, on real sockets: whether they take more, and that the client has left."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from api.http.response_writer import ResponseWriter, response_writer
from tests.api.http.listening import listening
from tests.waiting import wait_for_async

PIECE = b"x" * (1 << 16)
MOST_PIECES = 1000  # 64 MB, more than any socket's buffers take


class Response:
    """One whose parts the test sends itself."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.writer: ResponseWriter = response_writer(scope)
        self.was_ready = self.writer.ready
        self.is_over = asyncio.Event()
        self._send = send

    async def start(self, *headers: tuple[bytes, bytes]) -> ResponseWriter:
        await self.writer.start(self._send, {"type": "http.response.start", "status": 200, "headers": headers})
        return self.writer

    def fill(self) -> None:
        """Write until the client's side takes no more."""
        for _ in range(MOST_PIECES):
            if not self.writer.ready:
                return
            self.writer.write(PIECE)
        pytest.fail("the socket takes everything")


class App:
    def __init__(self) -> None:
        self.responses: list[Response] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = Response(scope, send)
        self.responses.append(response)
        await response.is_over.wait()
        if not response.writer.gone:
            await send({"type": "http.response.body"})
        response.writer.close()

    async def response(self, number: int = 0) -> Response:
        await wait_for_async(lambda: len(self.responses) > number, "the request's arrival")
        return self.responses[number]


class Client:
    """Takes little more than it reads."""

    def __init__(self, port: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.setblocking(False)
        self._address = ("127.0.0.1", port)

    async def ask(self, version: str = "1.1", times: int = 1) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, self._address)
        await loop.sock_sendall(self._socket, times * f"GET / HTTP/{version}\r\nHost: x\r\n\r\n".encode())

    async def read_until(self, end: bytes) -> bytes:
        """Everything up to `end`, or up to the connection's end where that is empty."""
        loop, read = asyncio.get_running_loop(), bytearray()
        async with asyncio.timeout(20):
            while not (end and read.endswith(end)):
                received = await loop.sock_recv(self._socket, 1 << 20)
                if not received:
                    assert not end, read
                    break
                read += received
        return bytes(read)

    def leave(self) -> None:
        self._socket.close()


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
async def client(app: App) -> AsyncIterator[Client]:
    async with listening(app) as port:
        client = Client(port)
        yield client
        client.leave()
        for response in app.responses:
            response.is_over.set()


@pytest.mark.parametrize(("version", "body"), [("1.1", b"1a\r\n%b\r\n0\r\n\r\n"), ("1.0", b"%b")])
async def test_pieces_come_between_the_head_and_the_end(app: App, client: Client, version: str, body: bytes) -> None:
    await client.ask(version)
    response = await app.response()
    assert not response.writer.ready
    writer = await response.start()
    assert writer.ready
    writer.write(b"x" * 26)
    assert writer.num_bytes == 26
    writer.close()
    assert not writer.ready
    response.is_over.set()
    told = body % (b"x" * 26)
    read = await client.read_until(told if version == "1.1" else b"")
    assert read.partition(b"\r\n\r\n")[2] == told


async def test_a_writer_is_not_ready_while_its_socket_is_full(app: App, client: Client) -> None:
    await client.ask()
    response = await app.response()
    writer, told = await response.start(), []
    writer.on_ready = lambda: told.append("ready")
    response.fill()
    assert not writer.ready and not told
    reading = asyncio.create_task(client.read_until(b"\r\n0\r\n\r\n"))
    await wait_for_async(lambda: told, "the socket takes more")
    assert writer.ready and told == ["ready"]
    response.is_over.set()
    assert len(await reading) > writer.num_bytes


async def test_a_writer_is_never_ready_again_after_its_client_left(app: App, client: Client) -> None:
    await client.ask()
    response = await app.response()
    writer, told = await response.start(), []
    writer.on_ready = lambda: told.append("ready")
    response.fill()
    client.leave()
    await wait_for_async(lambda: writer.gone, "the client's leaving")
    assert not writer.ready and not told


async def test_a_writer_waits_for_a_socket_that_the_head_filled(app: App, client: Client) -> None:
    await client.ask()
    response = await app.response()
    writer, told = await response.start(*(100 * [(b"x-long", PIECE)])), []
    assert not writer.ready
    writer.on_ready = lambda: told.append("ready")
    await client.read_until(b"\r\n\r\n")
    await wait_for_async(lambda: told, "the socket takes more")
    assert writer.ready


async def test_a_client_that_left_is_told_at_once_or_later(app: App, client: Client) -> None:
    await client.ask()
    response = await app.response()
    writer, left = response.writer, []
    writer.when_gone(lambda: left.append("later"))
    assert not left
    client.leave()
    await wait_for_async(lambda: left, "the client's leaving")
    writer.when_gone(lambda: left.append("at once"))
    assert left == ["later", "at once"]
    assert writer.gone and not (await response.start()).ready


async def test_only_the_response_under_way_learns_that_the_socket_takes_more(app: App, client: Client) -> None:
    """Two requests in a pipeline: the second one waits while the socket of both is full and takes more again."""
    await client.ask(times=2)
    first = await app.response()
    writer, told = await first.start(), []
    writer.on_ready = lambda: told.append("first")
    first.fill()
    reading = asyncio.create_task(client.read_until(b"\r\n0\r\n\r\n"))
    await wait_for_async(lambda: told, "the socket takes more")
    assert len(app.responses) == 1
    first.is_over.set()
    await reading
    second = await app.response(1)
    assert not second.was_ready and told == ["first"]
    assert (await second.start()).ready
