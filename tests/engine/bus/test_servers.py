"""Connections to the master that Sentinels name, before and after a failover of a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import redis

from engine.bus import leases
from engine.bus.call import BusUnavailable, Call
from engine.bus.connection import AsyncBus, Bus
from engine.bus.sentinel_url import SentinelUrl
from tests.redis_sentinel import NAME, SentinelSetup


@pytest.fixture(scope="module")
def setup() -> Iterator[SentinelSetup]:
    setup = SentinelSetup(sentinels=3)
    yield setup
    setup.stop()


def port() -> Call[int]:
    return Call(lambda answers: int(answers[0][1]), commands=(("CONFIG", "GET", "port"),))


async def test_a_master_that_becomes_a_replica_is_left(setup: SentinelSetup) -> None:
    """An ordered failover, in which both servers live."""
    with Bus(setup.url, patience=20.0) as bus:
        async with AsyncBus(setup.url, patience=20.0) as abus:
            names = [await abus.run(leases.announce_api()), bus.run(leases.announce_api())]
            await asyncio.to_thread(setup.fail_over)
            await abus.run(leases.beat_api(names[0]))
            bus.run(leases.beat_api(names[1]))
            assert await abus.run(port()) == bus.run(port()) == setup.master.port


async def test_buses_and_subscriptions_follow_a_failover(setup: SentinelSetup) -> None:
    """One Sentinel of three is dead from the start, and the first in the URL."""
    setup.kill_sentinel(0)
    with Bus(setup.url, patience=20.0) as bus:
        async with AsyncBus(setup.url, patience=20.0) as abus, abus.subscribe("c") as heard:
            with bus.subscribe("c") as heard_too:
                first = setup.master.port
                assert (await abus.run(port()), bus.run(port())) == (first, first)
                name = await abus.run(leases.announce_api())
                await asyncio.to_thread(setup.kill_master)
                with pytest.raises(BusUnavailable):
                    await heard.get(10.0)
                with pytest.raises(BusUnavailable):
                    heard_too.get(10.0)
            await abus.run(leases.beat_api(name))  # a script, on the shared connection
            assert await abus.run(port()) == bus.run(port()) == setup.master.port != first
        async with AsyncBus(setup.url) as abus, abus.subscribe("c") as heard:
            with redis.Redis.from_url(setup.master.url) as client:
                client.publish("c", "again")
            assert await heard.get(10.0) == ("c", b"again")


async def test_no_sentinel_and_an_unknown_name_are_told_without_passwords() -> None:
    url = "redis+sentinel://u:secret@127.0.0.1:1,127.0.0.1:2/nobody/0?sentinel_password=secret"
    with Bus(url, patience=0.1) as bus:
        async with AsyncBus(url, patience=0.1) as abus:
            for running in (asyncio.to_thread(bus.run, port()), abus.run(port()), abus.run(leases.beat_api("x"))):
                with pytest.raises(BusUnavailable, match="No master found for 'nobody'") as failed:
                    await running
                assert "secret" not in str(failed.value) and "127.0.0.1" in str(failed.value)


def test_a_url_taken_apart() -> None:
    parsed = SentinelUrl.parse(
        f"rediss+sentinel://user:p%2Fw%40@[::1]:1,h:26379/{NAME}/3?sentinel_username=s&sentinel_password=a%26b&ssl_cert_reqs=none"
    )
    assert parsed.sentinels == [("::1", 1), ("h", 26379)]
    assert (parsed.service, parsed.tls) == (NAME, True)
    assert parsed.server_options == {"username": "user", "password": "p/w@", "db": 3, "ssl_cert_reqs": "none"}
    told = {"username": "s", "password": "a&b", "ssl": True, "ssl_cert_reqs": "none"}
    assert parsed.sentinel_options.items() >= told.items()
    assert "password" not in SentinelUrl.parse("redis+sentinel://:p@h:1/m/0").sentinel_options
