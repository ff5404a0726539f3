"""Bus and AsyncBus on a Redis that is slow, away, restarted or full."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socketserver
import threading
import time
from collections.abc import Awaitable

import pytest
import redis

from engine.bus import control, keys, leases, records, transitions
from engine.bus.call import BusUnavailable, Call, Trouble, UnfitRedis, script
from engine.bus.connection import AsyncBus, Bus
from engine.bus.enqueue import accepts
from engine.bus.queue_depth import QueueDepth, queue_depth
from engine.bus.tokenizers import get_tokenizer, put_tokenizer
from engine.protocol import Abort, TokenizerBundle
from tests.engine.bus.ledger_world import MODEL, World
from tests.engine.bus.lossy_proxy import LossyProxy
from tests.redis_server import RedisServer
from tests.waiting import wait_for

BUNDLE = TokenizerBundle("{}", None, None, None, [], {})


def put(content_hash: str) -> Call[None]:
    return put_tokenizer(MODEL, content_hash, BUNDLE)


def get(content_hash: str) -> Call[TokenizerBundle | None]:
    return get_tokenizer(MODEL, content_hash)


async def test_both_buses_run_the_same_call(redis_url: str) -> None:
    with Bus(redis_url) as bus:
        async with AsyncBus(redis_url) as abus:
            bus.run(put("h"))
            assert await abus.run(get("h")) == bus.run(get("h")) == BUNDLE
            assert await abus.run(leases.dead_engines(MODEL)) == bus.run(leases.dead_engines(MODEL)) == []


def test_scripts_are_loaded_where_redis_has_forgotten_them(redis_url: str) -> None:
    with World(redis_url) as world:
        world.enqueue(world.request())
        world.raw.script_flush()
        world.enqueue(world.request())
        assert world.raw.script_exists(script("enqueue", "ledger", "takers", "entries", "memory", "admission").sha) == [True]
        assert len(world.entries()) == 2


async def test_scripts_are_loaded_by_the_asyncio_bus_too(redis_url: str) -> None:
    with World(redis_url) as world:
        world.raw.script_flush()
        async with AsyncBus(redis_url) as bus:
            outcome = await bus.run(transitions.finish(MODEL, "nobody", Abort("nobody")))
        assert outcome.state == "unknown"


def test_a_restart_is_waited_out(own_server: RedisServer) -> None:
    with Bus(own_server.url, patience=20.0) as bus:
        bus.run(put("h"))
        own_server.kill()
        with pytest.raises(BusUnavailable), Bus(own_server.url, patience=0.1) as hasty:
            hasty.run(get("h"))
        own_server.start()
        assert bus.run(get("h")) == BUNDLE, "on the connection that broke"


async def test_a_call_fails_within_the_patience_when_redis_is_away(own_server: RedisServer) -> None:
    async with AsyncBus(own_server.url, patience=0.3) as abus:
        with Bus(own_server.url, patience=0.3) as bus:
            await abus.run(put("h"))
            own_server.kill()
            for attempt in (lambda: abus.run(get("h")), lambda: asyncio.to_thread(bus.run, get("h"))):
                began = time.monotonic()
                with pytest.raises(BusUnavailable):
                    await attempt()
                assert time.monotonic() - began < 2.0
            own_server.start()
            assert await abus.run(get("h")) == BUNDLE


async def test_a_redis_that_hangs_is_away(own_server: RedisServer) -> None:
    assert own_server.process is not None
    async with AsyncBus(own_server.url, timeout=0.2, patience=0.3) as abus:
        with Bus(own_server.url, timeout=0.2, patience=0.3) as bus:
            bus.run(put("h"))
            await abus.run(put("h"))
            own_server.process.send_signal(signal.SIGSTOP)
            with pytest.raises(BusUnavailable):
                bus.run(get("h"))
            with pytest.raises(BusUnavailable):
                await abus.run(get("h"))
            own_server.process.send_signal(signal.SIGCONT)
            assert bus.run(get("h")) == await abus.run(get("h")) == BUNDLE


def test_a_wrong_password_is_said_at_once(own_server: RedisServer) -> None:
    with redis.Redis.from_url(own_server.url) as raw:
        raw.config_set("requirepass", "secret")
    with Bus(own_server.url, patience=60.0) as bus, pytest.raises(BusUnavailable, match=r"(?i)auth"):
        bus.run(get("h"))
    with (
        Bus(own_server.url.replace("redis://", "redis://:wrong@"), patience=60.0) as bus,
        pytest.raises(BusUnavailable, match="password"),
    ):
        bus.run(get("h"))
    with Bus(own_server.url.replace("redis://", "redis://:secret@")) as bus:
        assert bus.run(get("h")) is None


async def expect(trouble: Trouble, bus: Bus, abus: AsyncBus) -> None:
    """A script, a plain command and a transaction all fail with this trouble."""
    for call in (accepts(0), put("h"), leases.release_api("nobody")):
        if trouble is Trouble.MEMORY and call.transaction:
            continue  # it deletes
        for error in (await failure(asyncio.to_thread(bus.run, call)), await failure(abus.run(call))):
            assert error.trouble is trouble and str(error).startswith(f"Redis {trouble}: ")


async def failure(running: Awaitable[object]) -> BusUnavailable:
    with pytest.raises(BusUnavailable) as failed:
        await running
    return failed.value


async def test_an_unavailable_redis_gives_its_reason(own_server: RedisServer) -> None:
    with redis.Redis.from_url(own_server.url) as raw, Bus(own_server.url, patience=0.1) as bus:
        async with AsyncBus(own_server.url, patience=0.1) as abus:
            assert bus.run(accepts()) is None
            raw.config_set("maxmemory", 1)
            await expect(Trouble.MEMORY, bus, abus)
            raw.config_set("maxmemory", 0)
            raw.config_set("min-replicas-to-write", 1)
            await expect(Trouble.REPLICAS, bus, abus)
            raw.config_set("min-replicas-to-write", 0)
            fail_to_save(raw, own_server)
            await expect(Trouble.DISK, bus, abus)
            raw.config_set("stop-writes-on-bgsave-error", "no")
            raw.config_set("save", "")  # or it would not stop
            raw.replicaof("127.0.0.1", "1")
            await expect(Trouble.READ_ONLY, bus, abus)
            raw.config_set("replica-serve-stale-data", "no")
            for error in (await failure(asyncio.to_thread(bus.run, get("h"))), await failure(abus.run(get("h")))):
                assert error.trouble is Trouble.MASTER
            raw.replicaof("NO", "ONE")
            bus.run(put("h"))
            assert await abus.run(get("h")) == BUNDLE


async def test_a_redis_that_takes_no_more_clients_says_so(own_server: RedisServer) -> None:
    with redis.Redis.from_url(own_server.url) as raw, Bus(own_server.url, patience=0.1) as bus:
        async with AsyncBus(own_server.url, patience=0.1) as abus:
            raw.config_set("maxclients", 1)
            await expect(Trouble.CLIENTS, bus, abus)
            await expect_at_subscribing(Trouble.CLIENTS, bus, abus)
            raw.config_set("maxclients", 100)
            bus.run(put("h"))
            assert await abus.run(get("h")) == BUNDLE


async def test_a_redis_that_refuses_clients_from_elsewhere_says_so() -> None:
    """As protected mode does: an error that nobody asked for, and the end."""
    refusal = b"-DENIED Redis is running in protected mode because no password is set. In this mode ... 1) Just disable it.\r\n"

    class Refuse(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(refusal)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Refuse) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        url = f"redis://127.0.0.1:{server.server_address[1]}/0"
        try:
            with Bus(url, patience=60.0) as bus:
                async with AsyncBus(url, patience=60.0) as abus:
                    await expect(Trouble.PROTECTED, bus, abus)
                    await expect_at_subscribing(Trouble.PROTECTED, bus, abus)
                    assert str(await failure(abus.run(get("h")))).endswith("no password is set")
        finally:
            server.shutdown()
            serving.join()


async def expect_at_subscribing(trouble: Trouble, bus: Bus, abus: AsyncBus) -> None:
    with pytest.raises(BusUnavailable) as failed, bus.subscribe("one"):
        raise AssertionError("subscribed")
    with pytest.raises(BusUnavailable) as async_failed:
        async with abus.subscribe("one"):
            raise AssertionError("subscribed")
    assert failed.value.trouble is async_failed.value.trouble is trouble


async def test_a_user_who_may_not_listen_is_told_so(own_server: RedisServer) -> None:
    """The same user may run scripts, though it may not even ECHO."""
    with redis.Redis.from_url(own_server.url) as raw:
        raw.acl_setuser("joe", enabled=True, passwords=["+p"], commands=["+@all", "-echo"], keys=["*"], reset_channels=True)
    url = own_server.url.replace("redis://", "redis://joe:p@")
    with Bus(url) as bus:
        async with AsyncBus(url) as abus:
            bus.run(put("h"))
            assert bus.run(accepts()) is await abus.run(accepts()) is None
            with pytest.raises(UnfitRedis, match="channel"), bus.subscribe("one"):
                raise AssertionError("subscribed")
            with pytest.raises(UnfitRedis, match="channel"):
                async with abus.subscribe("one"):
                    raise AssertionError("subscribed")


async def test_a_read_that_waits_in_a_master_that_becomes_a_replica(own_server: RedisServer) -> None:
    """Redis breaks it off. It is an outage, which is waited for, and no fault of the program."""
    with World(own_server.url) as world, Bus(own_server.url) as bus:
        engine = world.engine()
        read = control.read_control(MODEL, engine.slot, engine.incarnation, block=1.0)
        reading = asyncio.create_task(asyncio.to_thread(bus.run, read))
        await asyncio.to_thread(wait_for, lambda: world.raw.info("clients")["blocked_clients"] == 1, "the read that waits")
        await asyncio.to_thread(world.raw.replicaof, "127.0.0.1", "1")
        assert (await reading).commands == []
        world.raw.replicaof("NO", "ONE")


def fail_to_save(raw: redis.Redis, server: RedisServer) -> None:
    """Its directory is gone."""
    shutil.rmtree(server.folder)
    raw.config_set("save", "3600 1")
    raw.bgsave()
    wait_for(lambda: raw.info("persistence")["rdb_last_bgsave_status"] == "err", "a failed save")


def is_busy(raw: redis.Redis) -> bool:
    try:
        return not raw.ping()
    except redis.ResponseError:
        return True


async def test_a_redis_that_is_busy_with_a_script_is_away(own_server: RedisServer) -> None:
    with (
        redis.Redis.from_url(own_server.url) as raw,
        redis.Redis.from_url(own_server.url) as somebody,
        Bus(own_server.url, patience=0.1) as bus,
    ):
        async with AsyncBus(own_server.url, patience=0.1) as abus:
            bus.run(put("h"))
            await abus.run(get("h"))
            raw.config_set("busy-reply-threshold", 1)  # ms
            endless = asyncio.get_running_loop().run_in_executor(None, somebody.eval, "while true do end", 0)
            wait_for(lambda: is_busy(raw), "the endless script")
            try:
                await expect(Trouble.BUSY, bus, abus)
                observed = await failure(abus.run(leases.dead_engines(MODEL)))  # which tells other errors from each other itself
                assert observed.trouble is Trouble.BUSY
            finally:
                raw.script_kill()
            with pytest.raises(redis.ResponseError, match="killed"):
                await endless
            bus.run(put("h"))
            assert await abus.run(get("h")) == BUNDLE


async def test_a_master_that_became_a_replica_is_left_for_the_new_one(own_server: RedisServer, redis_url: str) -> None:
    """Its name, or a proxy, leads to another server; the connections stay as they are."""
    finish, beat = transitions.finish(MODEL, "nobody", Abort("nobody")), leases.release_api("nobody")
    with LossyProxy(own_server.url) as proxy, redis.Redis.from_url(own_server.url) as old, Bus(proxy.url) as bus:
        async with AsyncBus(proxy.url) as abus:
            for call in (finish, put("h"), beat):
                bus.run(call)
                await abus.run(call)
            old.replicaof("127.0.0.1", "1")
            proxy.lead_to(redis_url)
            for call in (finish, put("h"), beat):
                bus.run(call)
                await abus.run(call)


def test_a_fault_of_the_program_is_no_outage(redis_url: str) -> None:
    with World(redis_url) as world, pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        world.raw.set(keys.live(MODEL), "no sorted set")
        world.bus.run(records.live_requests(MODEL))


async def test_more_calls_than_connections_wait_their_turn(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as raw:
        before = raw.info("clients")["connected_clients"]
        async with AsyncBus(redis_url, max_connections=4) as bus:
            await asyncio.gather(*(bus.run(put(str(number))) for number in range(200)))
            assert raw.info("clients")["connected_clients"] - before <= 4
            assert await bus.run(get("199")) == BUNDLE


async def test_cancelled_calls_leave_no_answer_behind_for_others(redis_url: str) -> None:
    async with AsyncBus(redis_url, max_connections=2) as bus:
        await bus.run(control.publish("warm", b""))
        for number in range(50):
            task = asyncio.create_task(bus.run(put(str(number))))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await bus.run(queue_depth(MODEL)) == QueueDepth(0, 0, 0, 0, 0)


def test_a_blocking_read_waits_longer_than_the_timeout(redis_url: str) -> None:
    with World(redis_url) as world, Bus(redis_url, timeout=0.2) as bus:
        engine = world.engine()
        began = time.monotonic()
        batch = bus.run(control.read_control(MODEL, engine.slot, engine.incarnation, block=0.5))
        assert (batch.commands, batch.last_id) == ([], "0")
        assert time.monotonic() - began > 0.4


def test_a_killed_redis_with_its_file_keeps_the_ledger(own_server: RedisServer) -> None:
    with World(own_server.url) as world:
        world.enqueue(*(world.request() for _ in range(20)))
        engine = world.engine()
        world.take(engine, 10)
        world.end(engine, *engine.running[:5])
        own_server.kill()
        own_server.start()
        world.check_integrity()
        assert world.take(engine, 100) == [f"r{number}" for number in range(11, 21)]
        world.check_integrity()
