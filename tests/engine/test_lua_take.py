"""take.lua and reject.lua: who has a request, through lost answers, races, zombies and trimmed entries."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from engine import calls, keys
from engine.bus import Bus
from engine.protocol import RequestEnded, decode_request
from tests.engine.ledger_world import Engine, Listener, World
from tests.engine.lossy_proxy import LossyProxy


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def test_it_takes_in_order_and_no_more_than_asked(world: World) -> None:
    world.enqueue(world.request("a"), world.request("b", priority=-1), world.request("c"))
    engine = world.engine()
    assert world.take(engine, 2) == ["b", "a"]
    record = world.record("b")
    assert (record.state, record.engine, record.incarnation) == ("running", engine.slot, engine.incarnation)
    assert record.received >= record.enqueued
    assert world.queued() == ["c"]
    world.check_integrity()


def test_of_nothing_it_takes_nothing(world: World) -> None:
    engine = world.engine()
    assert world.take(engine, 5) == []


def test_a_lost_answer_loses_no_request(world: World) -> None:
    world.enqueue(*(world.request() for _ in range(6)))
    engine = world.engine()
    with LossyProxy(world.url) as proxy, Bus(proxy.url) as bus:
        bus.run(calls.queue_depth(world.model))
        proxy.losses = 1
        taken = bus.run(world.take_call(engine, 2))
        assert proxy.lost == 1
    assert [decode_request(payload).request_id for _, payload in taken] == ["r1", "r2"]
    assert len(world.pending()) == 2
    world.check_integrity()


def test_run_again_long_after_the_answer_was_lost_it_gives_the_same(world: World) -> None:
    world.enqueue(*(world.request() for _ in range(4)))
    engine = world.engine()
    call = world.take_call(engine, 2)
    with LossyProxy(world.url) as proxy, Bus(proxy.url, patience=0.3) as bus:
        bus.run(calls.queue_depth(world.model))
        proxy.losses = 1_000
        with pytest.raises(calls.BusUnavailable):
            bus.run(call)
    assert [decode_request(payload).request_id for _, payload in world.bus.run(call)] == ["r1", "r2"]
    assert world.take(engine, 2) == ["r3", "r4"]
    world.check_integrity()


def test_racing_engines_share_without_overlap(world: World) -> None:
    names = [f"q{number}" for number in range(200)]
    world.enqueue(*(world.request(name) for name in names))
    engines = [world.engine() for _ in range(4)]

    def work(engine: Engine) -> None:
        while world.take(engine, 3):
            pass

    threads = [threading.Thread(target=work, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for engine in engines for name in engine.running) == sorted(names)
    world.check_integrity()


def test_a_zombie_takes_nothing(world: World) -> None:
    world.enqueue(world.request("a"))
    zombie = world.engine()
    world.crash(zombie)
    with pytest.raises(calls.Fenced):
        world.take(zombie)
    replacement = world.engine()
    assert replacement.slot == zombie.slot
    with pytest.raises(calls.Fenced):
        world.take(zombie)
    assert world.take(replacement) == ["a"]
    world.check_integrity()


def test_after_a_wipe_nobody_holds_anything(world: World) -> None:
    engine = world.engine()
    world.raw.flushall()
    with pytest.raises(calls.Fenced):
        world.take(engine)


def test_a_trimmed_entry_ends_its_request_instead_of_losing_it(world: World) -> None:
    outcome = world.enqueue(world.request("a"), world.request("b"))
    assert isinstance(outcome, calls.Enqueued)
    world.raw.xdel(keys.requests(world.model), outcome.entries[0])
    assert world.take(world.engine(), 2) == ["b"]
    assert (world.record("a").state, world.record("a").reason) == ("ended", "error")
    world.check_integrity()


def test_an_unreadable_entry_is_rejected_once(world: World) -> None:
    request = world.request("a")
    world.enqueue(request)
    engine = world.engine()
    (taken,) = world.bus.run(world.take_call(engine, 1))
    call = calls.reject(world.model, engine.slot, engine.incarnation, taken.entry, "cannot be read")
    with Listener(world) as listener:
        assert world.bus.run(call) is True
        assert world.bus.run(call) is False
        (message,) = listener.wait_for(1)
    assert isinstance(message, RequestEnded)
    assert (message.request_id, message.handle, str(message.reason), message.error) == (
        "a",
        request.handle,
        "error",
        "cannot be read",
    )
    assert world.record("a").error == "cannot be read"
    world.check_integrity()


def test_a_zombie_rejects_nothing(world: World) -> None:
    world.enqueue(world.request("a"))
    zombie = world.engine()
    (taken,) = world.bus.run(world.take_call(zombie, 1))
    world.crash(zombie)
    with pytest.raises(calls.Fenced):
        world.bus.run(calls.reject(world.model, zombie.slot, zombie.incarnation, taken.entry, "x"))
    heir = world.engine()
    assert world.bus.run(calls.reject(world.model, heir.slot, heir.incarnation, taken.entry, "x")) is False
    world.check_integrity()
