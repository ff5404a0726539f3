"""Subscriptions hear what is published, and notice when they are cut or their Redis falls silent."""

from __future__ import annotations

import asyncio
import signal

import pytest
import redis

import engine.bus.subscription
from engine.bus import control
from engine.bus.call import BusUnavailable
from engine.bus.connection import AsyncBus, Bus
from tests.redis_server import RedisServer


def test_a_subscription_hears_what_comes_and_no_more(redis_url: str) -> None:
    with Bus(redis_url) as bus, bus.subscribe("one", "two") as subscription:
        assert subscription.get(0.0) is None
        for number in range(3):
            assert bus.run(control.publish("two", b"%d" % number)) == 1
        assert bus.run(control.publish("three", b"")) == 0
        assert [subscription.get(5.0) for _ in range(3)] == [("two", b"0"), ("two", b"1"), ("two", b"2")]
        assert subscription.get(0.01) is None


async def test_an_asyncio_subscription_hears_large_and_many_messages(redis_url: str) -> None:
    payload = bytes(range(256)) * 1024
    async with AsyncBus(redis_url) as bus, bus.subscribe("one", "two") as subscription:
        assert await subscription.get(0.01) is None
        sent = [(("one", "two")[number % 2], payload[: 1 + number * 2000]) for number in range(100)]
        sender = asyncio.create_task(_send(bus, sent))
        assert [await subscription.get(5.0) for _ in sent] == sent
        await sender


async def _send(bus: AsyncBus, messages: list[tuple[str, bytes]]) -> None:
    for channel, payload in messages:
        await bus.run(control.publish(channel, payload))


async def test_a_cut_subscription_is_told_not_mended(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as raw, Bus(redis_url) as bus:
        async with AsyncBus(redis_url) as abus:
            with bus.subscribe("one") as subscription:
                async with abus.subscribe("one") as async_subscription:
                    raw.client_kill_filter(_type="pubsub")
                    with pytest.raises(BusUnavailable):
                        subscription.get(5.0)
                    with pytest.raises(BusUnavailable):
                        await async_subscription.get(5.0)


async def test_a_silent_subscription_is_questioned(own_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_server.process is not None
    monkeypatch.setattr(engine.bus.subscription, "PING_INTERVAL", 0.1)
    with Bus(own_server.url, timeout=0.3) as bus:
        async with AsyncBus(own_server.url, timeout=0.3) as abus:
            with bus.subscribe("one") as subscription:
                async with abus.subscribe("one") as async_subscription:
                    assert subscription.get(0.5) is None, "silent, but it answers"
                    assert await async_subscription.get(0.5) is None
                    bus.run(control.publish("one", b"still there"))
                    assert subscription.get(1.0) == await async_subscription.get() == ("one", b"still there")
                    own_server.process.send_signal(signal.SIGSTOP)
                    with pytest.raises(BusUnavailable):
                        await asyncio.to_thread(subscription.get, 10.0)
                    with pytest.raises(BusUnavailable):
                        await async_subscription.get(10.0)
                    own_server.process.send_signal(signal.SIGCONT)


async def test_subscribing_fails_when_redis_is_away(own_server: RedisServer) -> None:
    own_server.kill()
    with Bus(own_server.url) as bus, pytest.raises(BusUnavailable), bus.subscribe("one"):
        raise AssertionError("subscribed")
    async with AsyncBus(own_server.url) as abus:
        with pytest.raises(BusUnavailable):
            async with abus.subscribe("one"):
                raise AssertionError("subscribed")
