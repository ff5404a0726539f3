"""Whether a server is there: one that answers, one that does not, one that is none."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ops import probe
from ops.probe import ping, status_of


@asynccontextmanager
async def answering(answer: bytes, uds: str = "", context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server that gives everybody this answer; its port."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    if uds:
        server: asyncio.Server = await asyncio.start_unix_server(talk, uds)
    else:
        server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=context)
    async with server:
        yield 0 if uds else server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", 200),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", 503),
        (b"", None),
        (b"\r\n", None),
        (b"hello there\r\n", None),
        (b"a" * 100_000, None),
    ],
)
async def test_the_status_of_an_answer(answer: bytes, status: int | None) -> None:
    async with answering(answer) as port:
        assert await status_of(f"http://127.0.0.1:{port}", "/ready") == status


async def test_a_server_at_a_unix_socket(tmp_path: Path) -> None:
    async with answering(b"HTTP/1.1 204 No Content\r\n\r\n", str(tmp_path / "socket")):
        assert await status_of("http://localhost", "/", str(tmp_path / "socket")) == 204
    assert await status_of("http://localhost", "/", str(tmp_path / "none")) is None


async def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert await status_of(f"http://127.0.0.1:{port}", "/") is None
        assert not await ping(port, "secret")
    assert await status_of(f"http://127.0.0.1:{port}", "/") is None
    assert not await ping(port, "secret")


async def test_a_redis_that_answers(redis_url: str) -> None:
    port = urlsplit(redis_url).port
    assert port is not None
    assert not await ping(port, "of a server that has none")
