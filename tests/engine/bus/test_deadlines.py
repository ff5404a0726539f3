"""Deadlines of waiting and of running, by Redis' clock: what is late ends once, whichever process finds it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from engine.bus import control, keys
from engine.bus.deadlines import expire_late
from engine.protocol import LATE, LATE_IN_QUEUE, Abort, FinishReason, RequestEnded
from tests.engine.bus.ledger_world import Listener, World
from tests.waiting import wait_for


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def enqueue(world: World, name: str, **limits: float) -> None:
    request = world.request(name)
    world.enqueue(replace(request, facts=replace(request.facts, **limits)))


def pass_by(world: World, name: str, field: str) -> None:
    """The deadline is over, as if time had passed."""
    world.raw.hset(keys.record(world.model, name), field, "1.5")
    world.raw.zadd(keys.deadlines(world.model), {name: 1.5}, xx=True)


@pytest.mark.parametrize("field", ["deadline", "wait_until"])
def test_take_drops_what_is_late_when_it_comes_to_it(world: World, field: str) -> None:
    for name in ("late", "good"):
        enqueue(world, name, timeout=60, queue_timeout=30)
    pass_by(world, "late", field)
    with Listener(world) as listener:
        assert world.take(world.engine(), 5) == ["good"]
        (message,) = listener.wait_for(1)
    assert isinstance(message, RequestEnded)
    assert (message.request_id, message.reason, message.error) == ("late", FinishReason.ERROR, LATE_IN_QUEUE)
    assert (world.record("late").state, world.record("late").error) == ("ended", LATE_IN_QUEUE)
    assert world.raw.zcard(keys.deadlines(world.model)) == 1
    world.check_integrity()


def test_a_sweep_ends_what_waits_and_orders_the_end_of_what_runs(world: World) -> None:
    engine = world.engine()
    enqueue(world, "runs", timeout=60)
    world.take(engine)
    enqueue(world, "waits", queue_timeout=60)
    enqueue(world, "in time", timeout=60)
    assert world.bus.run(expire_late(world.model)) == (0, 0)
    pass_by(world, "runs", "deadline")
    pass_by(world, "waits", "wait_until")
    assert world.bus.run(expire_late(world.model)) == (1, 1)
    assert world.bus.run(expire_late(world.model)) == (0, 0), "each once"
    assert world.record("waits").error == LATE_IN_QUEUE and world.record("in time").state == "queued"
    (command,) = world.bus.run(control.read_control(world.model, engine.slot, engine.incarnation, "0")).commands
    assert isinstance(command, Abort)
    assert (command.request_id, command.reason, command.error) == ("runs", FinishReason.ERROR, LATE)
    world.end(engine, "runs")
    assert world.raw.zrange(keys.deadlines(world.model), 0, -1) == [b"in time"]
    world.check_integrity()


def test_the_time_for_waiting_ends_when_an_engine_takes_the_request(world: World) -> None:
    engine = world.engine()
    enqueue(world, "a", queue_timeout=60)
    world.take(engine)
    assert world.raw.zcard(keys.deadlines(world.model)) == 0
    pass_by(world, "a", "wait_until")
    heir = world.replace(engine)
    assert world.take(heir) == ["a"], "its client waits in mid-stream"
    world.check_integrity()


def test_a_deadline_survives_its_engine(world: World) -> None:
    engine = world.engine()
    enqueue(world, "a", timeout=60)
    world.take(engine)
    heir = world.replace(engine)
    pass_by(world, "a", "deadline")
    assert world.take(heir) == []
    assert world.record("a").error == LATE_IN_QUEUE
    world.check_integrity()


def test_deadlines_are_redis_times(world: World) -> None:
    enqueue(world, "a", timeout=0.02)
    wait_for(lambda: world.bus.run(expire_late(world.model)).in_queue, "the deadline")
