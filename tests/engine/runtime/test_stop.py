"""An engine that stops, drains or is fenced leaves its requests to the next one; over a real Redis with the null model."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable

import pytest

from engine.bus import failover, leases
from engine.bus.call import Fenced
from engine.client.client import AsyncClient
from engine.runtime.loop import IDLE_SECONDS
from engine.runtime.stop_signals import StopSignals
from tests.engine.conftest import MODEL, RunningEngine
from tests.engine.runtime.null_requests import add, add_long, expected, make_request, settled
from tests.waiting import wait_for_async


async def test_a_hung_engine_is_fenced_and_its_requests_go_on_elsewhere(
    slow_engine: RunningEngine, start_engine: Callable[..., RunningEngine], client: AsyncClient
) -> None:
    """Its slot is taken from it while it runs, as after a stop that outlasted its time to live."""
    request = make_request(client, max_tokens=60)
    (stream,) = await add(client, request)
    await stream.has_tokens()
    slow_engine.bus.run(failover.takeover(MODEL, slow_engine.info.slot, slow_engine.info.incarnation, sure=True))
    await asyncio.to_thread(slow_engine.join)
    assert isinstance(slow_engine.error, Fenced)
    engine = start_engine()
    async with asyncio.timeout(20):
        tokens, _ = await stream.whole()
    assert tokens == [expected(request)]
    await settled(engine)


async def test_a_stop_leaves_running_requests_to_the_next_engine(
    slow_engine: RunningEngine, start_engine: Callable[..., RunningEngine], client: AsyncClient
) -> None:
    request = make_request(client, max_tokens=60)
    (stream,) = await add(client, request)
    await stream.has_tokens()
    slow_engine.loop.stop()
    await asyncio.to_thread(slow_engine.join)
    assert slow_engine.bus.run(leases.engines(MODEL)) == []
    assert slow_engine.error is None
    record = await client.record(MODEL, stream.request_id)
    assert record is not None and (record.state, record.attempts) == ("queued", 0), "nobody died of it"
    engine = start_engine()
    assert engine.info.slot == slow_engine.info.slot
    async with asyncio.timeout(20):
        tokens, _ = await stream.whole()
    assert tokens == [expected(request)]
    await settled(engine)


async def test_a_draining_engine_still_obeys_aborts(slow_engine: RunningEngine, client: AsyncClient) -> None:
    stream = await add_long(client)
    slow_engine.loop.stop(timeout=60)
    async with asyncio.timeout(10):
        result = await client.abort(MODEL, stream.request_id)
    assert result.state == "ended" and 0 < result.num_tokens < 450
    slow_engine.join()  # nothing is left to wait for
    assert slow_engine.error is None


async def test_of_two_stops_the_shorter_time_counts(slow_engine: RunningEngine, client: AsyncClient) -> None:
    stream = await add_long(client)
    slow_engine.loop.stop(timeout=0)
    slow_engine.loop.stop(timeout=60)
    slow_engine.join()
    record = await client.record(MODEL, stream.request_id)
    assert record is not None and record.state == "queued"
    assert (await client.abort(MODEL, stream.request_id)).state == "ended", "it needs no engine"


def test_stop_takes_no_lock_of_the_loop(engine: RunningEngine) -> None:
    """A signal handler runs it between any two instructions of the loop, one that rings the intake's bell among them."""
    stopping = threading.Thread(target=engine.loop.stop, daemon=True)
    with engine.loop.intake._bell._cond:
        stopping.start()
        stopping.join(10)
        assert not stopping.is_alive()
    engine.join()


async def test_requests_in_the_inbox_are_left_to_the_next_engine(
    engine: RunningEngine,
    start_engine: Callable[..., RunningEngine],
    client: AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = threading.Event()
    monkeypatch.setattr(engine.loop, "_take_in", lambda: looks.wait(0.01))  # the inbox is never emptied
    await asyncio.to_thread(looks.wait, 2 * IDLE_SECONDS)  # a look that had begun is over
    request = make_request(client)
    (stream,) = await add(client, request)

    async def running() -> bool:
        record = await client.record(MODEL, stream.request_id)
        return record is not None and record.state == "running"

    async with asyncio.timeout(10):
        await wait_for_async(running, "the engine has taken it")
        engine.loop.stop()
        await asyncio.to_thread(engine.join)
        heir = start_engine()
        tokens, _ = await stream.whole()
    assert tokens == [expected(request)]
    await settled(heir)


def test_the_second_signal_leaves_no_time() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    told: list[float] = []
    try:
        signals = StopSignals(20.0)
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)  # while the model loads
        signals.obey_with(told.append)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert told == [20.0, 0.0, 0.0]
