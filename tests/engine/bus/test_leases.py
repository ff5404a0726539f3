"""Who may declare death: a watcher that saw the heartbeat missing for a whole time to live, Redis up all the while."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.bus import keys, leases, transitions
from engine.bus.leases import DeadEngine, DeathWatch, Observation
from tests.engine.bus.ledger_world import World
from tests.waiting import wait_for


@pytest.fixture
def world(redis_url: str) -> Iterator[World]:
    with World(redis_url) as world:
        yield world


GONE = Observation(pending={"0": 3, "1": 1}, holders={"1": 50}, last_incarnation=50)
BACK = Observation(pending={"0": 3, "1": 1}, holders={"0": 60, "1": 50}, last_incarnation=60)


def test_missing_for_a_whole_time_to_live_is_dead_and_stays_so() -> None:
    watch = DeathWatch(ttl=2.0)
    assert [watch.observe(GONE, now) for now in (10.0, 11.0, 11.9)] == [[], [], []]
    assert watch.observe(GONE, 12.0) == [DeadEngine("0", 50)]
    assert watch.observe(GONE, 13.0) == [DeadEngine("0", 50)]


def test_who_comes_back_in_time_begins_anew() -> None:
    watch = DeathWatch(ttl=2.0)
    assert [watch.observe(each, now) for each, now in ((GONE, 0.0), (GONE, 1.5), (BACK, 2.0), (GONE, 2.5), (GONE, 4.4))] == [[]] * 5
    assert watch.observe(GONE, 4.5) == [DeadEngine("0", 50)]


def test_an_engine_with_nothing_in_flight_needs_no_burial() -> None:
    watch = DeathWatch(ttl=2.0)
    idle = Observation(pending={}, holders={}, last_incarnation=50)
    assert [watch.observe(idle, now) for now in (0.0, 2.0, 4.0)] == [[], [], []]


def test_while_redis_was_away_nothing_was_seen() -> None:
    watch = DeathWatch(ttl=2.0)
    watch.observe(GONE, 0.0)
    watch.lost_contact()
    assert [watch.observe(GONE, now) for now in (2.0, 3.0)] == [[], []]
    assert watch.observe(GONE, 4.0) == [DeadEngine("0", 50)]


def test_a_watcher_that_slept_has_not_watched() -> None:
    watch = DeathWatch(ttl=2.0)
    watch.observe(GONE, 0.0)
    assert [watch.observe(GONE, now) for now in (100.0, 101.0)] == [[], []]
    assert watch.observe(GONE, 102.0) == [DeadEngine("0", 50)]


def test_an_observation_says_who_has_what_and_who_lives(world: World) -> None:
    assert world.bus.run(leases.observe(world.model)) == Observation({}, {}, 0)
    first, second, idle = world.engine(), world.engine(), world.engine()
    world.enqueue(*(world.request() for _ in range(3)))
    world.take(first, 2)
    world.take(second)
    world.crash(first)
    seen = world.bus.run(leases.observe(world.model))
    assert seen == Observation({"0": 2, "1": 1}, {"1": second.incarnation, "2": idle.incarnation}, idle.incarnation)


def test_from_heartbeat_to_burial(world: World) -> None:
    engine = world.engine(ttl=0.02)
    world.enqueue(world.request("a"))
    world.take(engine)
    watch = DeathWatch(ttl=2.0)
    wait_for(lambda: not world.raw.exists(keys.slot(world.model, engine.slot)), "the end of its time to live")
    assert watch.observe(world.bus.run(leases.observe(world.model)), 0.0) == []
    (dead,) = watch.observe(world.bus.run(leases.observe(world.model)), 2.0)
    assert world.bus.run(transitions.fail_engine(world.model, *dead, "it died")) == 1
    assert watch.observe(world.bus.run(leases.observe(world.model)), 4.0) == []


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
