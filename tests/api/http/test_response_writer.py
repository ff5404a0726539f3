"""What a response may know of its connection, on real sockets: whether they take more, and that the client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.api.http.full_sockets import PIECE, App, Client
from tests.api.http.listening import listening
from tests.waiting import wait_for_async


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
