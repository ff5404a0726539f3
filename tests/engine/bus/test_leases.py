"""An observer may declare an engine dead when the heartbeat was missing for a whole time to live, while Redis was up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.bus import failover, keys, leases
from engine.bus.failover import TakenOver
from engine.bus.leases import DeadEngine
from tests.engine.bus.ledger_world import Engine, World, engine_info
from tests.waiting import wait_for


@pytest.fixture
def world(redis_url: str) -> Iterator[World]:
    with World(redis_url) as world:
        yield world


def crashed(world: World, num_requests: int = 1) -> Engine:
    """An engine that has died with requests in flight."""
    engine = world.engine()
    world.enqueue(*(world.request() for _ in range(num_requests)))
    world.take(engine, num_requests)
    world.crash(engine)
    return engine


def test_an_engine_without_heartbeat_for_a_whole_time_to_live_is_dead_and_stays_so(world: World) -> None:
    living, _ = world.engine(), world.engine()  # one with something in flight, one without
    dead = crashed(world, 2)
    world.enqueue(world.request())
    world.take(living)
    assert world.bus.run(leases.dead_engines(world.model, ttl=60.0)) == []
    assert world.bus.run(leases.dead_engines(world.model, ttl=60.0)) == [], "too soon after the first look"
    named = wait_for(lambda: world.bus.run(leases.dead_engines(world.model, ttl=0.02)), "its death")
    assert named == [DeadEngine(dead.slot, dead.incarnation)]
    assert world.bus.run(leases.dead_engines(world.model, ttl=0.02)) == named
    assert world.bus.run(failover.takeover(world.model, *named[0])) == TakenOver(2, 0)
    assert world.bus.run(leases.dead_engines(world.model, ttl=0.001)) == []


def test_several_engines_die_at_once(world: World) -> None:
    engines = [world.engine() for _ in range(3)]
    for engine in engines:
        world.enqueue(world.request())
        world.take(engine)
    for engine in engines:
        world.crash(engine)
    world.bus.run(leases.dead_engines(world.model))
    slots = [engine.slot for engine in engines]
    wait_for(lambda: [dead.slot for dead in world.bus.run(leases.dead_engines(world.model, ttl=0.02))] == slots, "their deaths")


def test_a_slot_with_a_new_owner_is_looked_at_twice_again(world: World) -> None:
    dead = crashed(world)
    assert world.bus.run(leases.dead_engines(world.model, ttl=0.02)) == []
    successor = world.replace(dead)
    assert successor.slot == dead.slot
    assert world.bus.run(leases.dead_engines(world.model, ttl=0.02)) == []
    world.crash(successor)
    assert world.bus.run(leases.dead_engines(world.model, ttl=60.0)) == []


def test_an_engine_whose_heartbeat_came_back_between_two_looks_lives(world: World) -> None:
    engine = crashed(world)
    assert world.bus.run(leases.dead_engines(world.model, ttl=0.02)) == []
    world.bus.run(leases.beat(world.model, engine.slot, engine.incarnation, engine_info()))
    assert world.bus.run(leases.dead_engines(world.model, ttl=0.02)) == []
    world.crash(engine)
    assert world.bus.run(leases.dead_engines(world.model, ttl=60.0)) == [], "its silence begins anew"


def test_a_dead_engine_with_nothing_in_flight_leaves_its_slot(world: World) -> None:
    assert world.bus.run(leases.dead_engines(world.model)) == []
    engine = world.engine()
    world.crash(engine)
    (dead,) = wait_for(lambda: world.bus.run(leases.dead_engines(world.model, ttl=0.02)), "its death")
    assert world.bus.run(failover.takeover(world.model, *dead)) == TakenOver(0, 0)
    assert world.bus.run(leases.dead_engines(world.model, ttl=0.001)) == []
    assert world.engine().slot == engine.slot


def test_api_servers_come_beat_and_go(world: World) -> None:
    names = [world.bus.run(leases.announce_api(ttl=1.0)) for _ in range(3)]
    assert len(set(names)) == 3
    assert world.raw.exists(*map(keys.api, names)) == 3
    assert [name.decode() for name in world.raw.zrange(keys.apis(), 0, -1)] == sorted(names)
    world.bus.run(leases.beat_api(names[0], ttl=60.0))
    assert world.raw.pttl(keys.api(names[0])) > 50_000
    world.bus.run(leases.release_api(names[1]))
    assert world.raw.exists(keys.api(names[1])) == 0
    assert names[1].encode() not in world.raw.zrange(keys.apis(), 0, -1)
