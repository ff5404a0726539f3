"""Clients that take nothing of their answers are hung up on; slow ones are not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from tests.api.http.full_sockets import App, Client
from tests.api.http.listening import listening
from tests.waiting import wait_for_async

STALL_SECONDS = 0.4


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def dropped() -> list[str]:
    return []


@pytest.fixture
async def client(app: App, dropped: list[str]) -> AsyncIterator[Client]:
    async with listening(app, request_timeout=0.3, stall_timeout=STALL_SECONDS, dropped=dropped.append) as port:
        client = Client(port)
        yield client
        client.leave()
        for response in app.responses:
            response.is_over.set()


async def test_a_client_that_takes_nothing_is_hung_up_on(
    app: App, client: Client, dropped: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    await client.ask()
    response = await app.response()
    writer, left = await response.start(), list[str]()
    writer.when_gone(lambda: left.append("gone"))
    response.fill()
    filled = asyncio.get_running_loop().time()
    with caplog.at_level(logging.WARNING, "headrace.api"):
        await wait_for_async(lambda: left, "the end of the connection")
    assert asyncio.get_running_loop().time() - filled >= STALL_SECONDS * 0.9
    assert dropped == ["stalled"] and "hung up on a client that took nothing of" in caplog.text


async def test_a_client_that_reads_slowly_stays(app: App, client: Client, dropped: list[str]) -> None:
    """Far less than its kernel's buffer holds, so that the socket takes no more all the while."""
    await client.ask()
    response = await app.response()
    writer = await response.start()
    response.fill()
    await client.read_slowly(3 * STALL_SECONDS)
    assert not writer.ready and not writer.gone and not dropped
    await wait_for_async(lambda: dropped, "the end of the connection, once it reads no more")


async def test_a_connection_whose_answer_is_over_does_not_wait_for_ever(app: App, client: Client, dropped: list[str]) -> None:
    """It closes when the client has taken what waits, which is too little for the server to stop writing."""
    await client.ask("1.0")
    response = await app.response()
    writer = await response.start()
    transport = writer._cycle.transport
    while not transport.get_write_buffer_size():
        writer.write(b"x" * 1000)
    assert writer.ready
    response.is_over.set()
    await wait_for_async(lambda: dropped, "the end of the connection")
    assert dropped == ["stalled"]
