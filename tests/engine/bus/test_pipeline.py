"""Scripts of many tasks on one connection: each gets its own answer, or learns that it has none, and another connection follows."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
import redis

from engine.bus import keys, transitions
from engine.bus.call import BusUnavailable, Call
from engine.bus.connection import AsyncBus
from engine.bus.transitions import FinishOutcome
from engine.protocol import Abort
from tests.engine.bus.ledger_world import MODEL
from tests.engine.bus.lossy_proxy import LossyProxy
from tests.redis_server import RedisServer


def finish(request_id: str) -> Call[FinishOutcome]:
    return transitions.finish(MODEL, request_id, Abort(request_id))


async def test_concurrent_scripts_share_one_connection(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as raw:
        async with AsyncBus(redis_url) as bus:
            await bus.run(finish("first"))
            before = raw.info("clients")["connected_clients"]
            outcomes = await asyncio.gather(*(bus.run(finish(str(number))) for number in range(300)))
            assert {outcome.state for outcome in outcomes} == {"unknown"}
            assert raw.info("clients")["connected_clients"] == before
            assert raw.exists(*(keys.tombstone(MODEL, str(number)) for number in range(300))) == 300


async def test_the_answer_of_a_cancelled_call_reaches_no_other_call(redis_url: str) -> None:
    async with AsyncBus(redis_url) as bus:
        with redis.Redis.from_url(redis_url) as raw:
            raw.hset(keys.record(MODEL, "ended"), mapping={"state": "ended", "id": "ended"})
            for _ in range(50):
                task = asyncio.create_task(bus.run(finish("ended")))
                await asyncio.sleep(0)
                task.cancel()
                assert (await bus.run(finish("other"))).state == "unknown"
                with pytest.raises(asyncio.CancelledError):
                    await task


async def test_a_lost_answer_is_asked_for_again(redis_url: str) -> None:
    with LossyProxy(redis_url) as proxy:
        async with AsyncBus(proxy.url) as bus:
            await bus.run(finish("first"))
            proxy.losses = 1
            outcomes = await asyncio.gather(*(bus.run(finish(str(number))) for number in range(20)))
            assert proxy.lost == 1
            assert [outcome.state for outcome in outcomes] == ["unknown"] * 20


async def test_a_silent_redis_is_away_and_comes_back(own_server: RedisServer) -> None:
    assert own_server.process is not None
    async with AsyncBus(own_server.url, timeout=0.2, patience=0.3) as bus:
        await bus.run(finish("first"))
        own_server.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        for outcome in await asyncio.gather(*(bus.run(finish(str(number))) for number in range(9)), return_exceptions=True):
            assert isinstance(outcome, BusUnavailable)
        assert time.monotonic() - began < 2.0
        own_server.process.send_signal(signal.SIGCONT)
        assert (await bus.run(finish("x"))).state == "unknown"


async def test_a_restart_is_waited_out(own_server: RedisServer) -> None:
    async with AsyncBus(own_server.url, patience=20.0) as bus:
        await bus.run(finish("first"))
        own_server.kill()
        waiting = asyncio.gather(*(bus.run(finish(str(number))) for number in range(9)))
        await asyncio.to_thread(own_server.start)
        assert {outcome.state for outcome in await waiting} == {"unknown"}


async def test_scripts_run_on_a_redis_with_a_password(own_server: RedisServer) -> None:
    with redis.Redis.from_url(own_server.url) as raw:
        raw.config_set("requirepass", "secret")
    async with AsyncBus(own_server.url, patience=60.0) as bus:
        with pytest.raises(BusUnavailable, match=r"(?i)auth"):
            await bus.run(finish("x"))
    async with AsyncBus(own_server.url.replace("redis://", "redis://:secret@")) as bus:
        assert (await bus.run(finish("x"))).state == "unknown"
