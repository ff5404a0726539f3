"""An engine that stops, drains or is fenced ends its requests; over a real Redis with the null model."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engine.bus import leases
from engine.bus.call import Fenced
from engine.client.client import AsyncClient
from engine.protocol import (
    FinishReason,
)
from engine.runtime.loop import IDLE_SECONDS
from tests.engine.conftest import MODEL, RunningEngine
from tests.engine.runtime.null_requests import add, add_long, make_request
from tests.waiting import wait_for_async


async def test_a_hung_engine_is_fenced_and_its_requests_end(slow_engine: RunningEngine, client: AsyncClient) -> None:
    """Its slot is taken from it while it runs, as after a stop that outlasted its time to live."""
    stream = await add_long(client)
    slow_engine.bus.run(leases.release_slot(MODEL, slow_engine.info.slot, slow_engine.info.incarnation))
    async with asyncio.timeout(10):
        _, ends = await stream.whole()
    assert ends[0].reason == FinishReason.ERROR
    slow_engine.join()
    assert isinstance(slow_engine.error, Fenced)
    record = await client.record(MODEL, stream.request_id)
    assert record is not None and (record.state, record.reason) == ("ended", "error")


async def test_shutdown_ends_running_requests(slow_engine: RunningEngine, client: AsyncClient) -> None:
    stream = await add_long(client)
    slow_engine.loop.stop()
    async with asyncio.timeout(5):
        _, ends = await stream.whole()
    assert (ends[0].reason, ends[0].error) == (FinishReason.ERROR, "The engine was shut down.")
    slow_engine.join()
    assert slow_engine.bus.run(leases.engines(MODEL)) == []
    assert slow_engine.error is None


async def test_a_draining_engine_still_obeys_aborts(slow_engine: RunningEngine, client: AsyncClient) -> None:
    stream = await add_long(client)
    slow_engine.loop.stop(timeout=60)
    async with asyncio.timeout(10):
        result = await client.abort(MODEL, stream.request_id)
    assert result.state == "ended" and 0 < result.num_tokens < 450
    slow_engine.join()  # nothing is left to wait for
    assert slow_engine.error is None


async def test_the_second_stop_does_not_wait(slow_engine: RunningEngine, client: AsyncClient) -> None:
    stream = await add_long(client)
    slow_engine.loop.stop(timeout=60)
    slow_engine.loop.stop(timeout=60)
    slow_engine.join()
    _, (end,) = await stream.whole()
    assert end.reason == FinishReason.ERROR


def test_stop_takes_no_lock_of_the_loop(engine: RunningEngine) -> None:
    """A signal handler runs it between any two instructions of the loop, one that rings the intake's bell among them."""
    stopping = threading.Thread(target=engine.loop.stop, daemon=True)
    with engine.loop.intake._bell._cond:
        stopping.start()
        stopping.join(10)
        assert not stopping.is_alive()
    engine.join()


async def test_requests_in_the_inbox_end_with_their_engine(
    engine: RunningEngine, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = threading.Event()
    monkeypatch.setattr(engine.loop, "_take_in", lambda: looks.wait(0.01))  # the inbox is never emptied
    await asyncio.to_thread(looks.wait, 2 * IDLE_SECONDS)  # a look that had begun is over
    (stream,) = await add(client, make_request(client))

    async def running() -> bool:
        record = await client.record(MODEL, stream.request_id)
        return record is not None and record.state == "running"

    async with asyncio.timeout(10):
        await wait_for_async(running, "the engine has taken it")
        engine.loop.stop()
        tokens, (end,) = await stream.whole()
    assert tokens == [[]] and (end.reason, end.error) == (FinishReason.ERROR, "The engine was shut down.")
    await asyncio.to_thread(engine.join)
