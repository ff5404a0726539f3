"""Responses whose parts a test sends itself, and a client that takes little more than it reads, on real sockets."""

from __future__ import annotations

import asyncio
import socket

import pytest
from starlette.types import Receive, Scope, Send

from api.http.response_writer import ResponseWriter, response_writer
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

    async def read_slowly(self, seconds: float) -> None:
        """A few kilobytes at a time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while loop.time() < until:
            await loop.sock_recv(self._socket, 4096)
            await asyncio.sleep(0.01)

    def leave(self) -> None:
        self._socket.close()
