"""enqueue.lua wakes the engines that are next, and take.lua passes a wake-up on: no request waits for an engine that refuses it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from engine.bus import keys, transitions
from engine.bus.subscription import Subscription
from tests.engine.bus.ledger_world import Engine, World
from tests.waiting import wait_for


@pytest.fixture
def world(each_redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(transitions, "SHARE_TTL", 60.0)
    with World(each_redis_url) as world:
        yield world


class Bells:
    """Engines of a world that listen."""

    def __init__(self, world: World, *engines: Engine) -> None:
        self._world = world
        self._engines = engines
        self._stack = ExitStack()

    def __enter__(self) -> Bells:
        channels = (keys.wake_channel(self._world.model, engine.slot) for engine in self._engines)
        self._bells: list[Subscription] = [
            self._stack.enter_context(self._world.bus.subscribe(channel, "marks")) for channel in channels
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def rung(self) -> list[Engine]:
        """Those that were woken since the last call, once for each time."""
        self._world.raw.publish("marks", b"")
        return [engine for engine, bell in zip(self._engines, self._bells, strict=True) for _ in range(_before_mark(bell))]


def _before_mark(bell: Subscription) -> int:
    for count in range(1000):
        message = bell.get(5.0)
        assert message is not None
        if message[0] == "marks":
            return count
    raise AssertionError("no end of wake-ups")


def sharers(world: World, count: int) -> list[Engine]:
    """Engines that have just asked, and found nothing."""
    engines = [world.engine() for _ in range(count)]
    for engine in engines:
        assert world.take(engine, 100) == []
    return engines


def give(world: World, engine: Engine, count: int) -> None:
    """This engine is the lowest, by as many."""
    world.enqueue(*(world.request() for _ in range(count)))
    assert len(world.take(engine, count, places=100)) == count


def test_a_request_wakes_the_engine_with_least_in_flight_and_no_other(world: World) -> None:
    (busy,) = sharers(world, 1)
    give(world, busy, 3)
    first, second = sharers(world, 2)
    give(world, first, 1)
    with Bells(world, busy, first, second) as bells:
        world.enqueue(world.request())
        assert bells.rung() == [second]
        world.enqueue(world.request())
        assert bells.rung() == [first], "the one before is another's"
        world.enqueue(world.request())
        assert bells.rung() == [busy]
    world.check_integrity()


def test_a_list_wakes_an_engine_a_request(world: World) -> None:
    engines = sharers(world, 3)
    with Bells(world, *engines) as bells:
        world.enqueue(world.request(), world.request())
        assert len(set(bells.rung())) == 2
        for engine in engines:
            world.take(engine, 100)
        bells.rung()
        world.enqueue(*(world.request() for _ in range(40)))
        assert bells.rung() == engines, "each once"


def test_ends_put_an_engine_first_again(world: World) -> None:
    first, second = sharers(world, 2)
    give(world, first, 1)
    give(world, second, 1)
    world.end(first, *first.running)
    with Bells(world, first, second) as bells:
        world.enqueue(world.request())
        assert bells.rung() == [first]


def test_full_engines_are_woken_only_where_none_has_places(world: World) -> None:
    full, other = sharers(world, 2)
    assert world.take(full, 4, places=0) == []
    give(world, other, 5)
    with Bells(world, full, other) as bells:
        world.enqueue(world.request())
        assert bells.rung() == [other]
        assert len(world.take(other, 4, places=0)) == 1
        world.enqueue(world.request())
        assert bells.rung() == [full], "it keeps a line, and has less in flight"


def test_an_engine_that_cannot_take_is_not_woken(world: World) -> None:
    asleep, other = sharers(world, 2)
    assert world.take(asleep, 0, places=0) == []
    with Bells(world, asleep, other) as bells:
        world.enqueue(world.request(), world.request())
        assert bells.rung() == [other]


def test_an_engine_that_does_not_listen_is_passed(world: World) -> None:
    deaf, other = sharers(world, 2)
    give(world, other, 1)
    with Bells(world, other) as bells:
        world.enqueue(world.request())
        assert bells.rung() == [other]
        assert world.take(other, 100) == [], "it may be the other's still"
        world.crash(deaf)
        assert len(world.take(other, 100)) == 1, "it never is a dead engine's"


def test_a_request_that_a_hung_engine_was_woken_for_is_taken_when_its_share_lapses(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, other = sharers(world, 2)
    give(world, other, 1)
    with Bells(world, hung, other) as bells:
        world.enqueue(world.request())
        assert bells.rung() == [hung]
        assert world.take(other, 100) == []
        assert bells.rung() == [hung], "it is told again"
        monkeypatch.setattr(transitions, "SHARE_TTL", 0.05)
        wait_for(lambda: world.take(other, 100), "the request")
        bells.rung()
        world.enqueue(world.request())
        assert bells.rung() == [other], "it is not waited for again"


def test_an_engine_that_refuses_wakes_the_next(world: World) -> None:
    (other,) = sharers(world, 1)
    give(world, other, 2)
    (short,) = sharers(world, 1)
    give(world, short, 1)
    (full,) = sharers(world, 1)
    with Bells(world, full, short, other) as bells:
        world.enqueue(world.request("long", tokens=100))
        assert bells.rung() == [full]
        assert world.take(full, 0) == []
        assert bells.rung() == [short]
        assert world.take(short, 100, room=50) == []
        assert bells.rung() == [other]
        assert world.take(other, 100) == ["long"]
        assert bells.rung() == []
    world.check_integrity()


def test_an_engine_that_cannot_read_a_request_wakes_one_that_can(world: World) -> None:
    behind, current = sharers(world, 2)
    assert world.take(behind, 100, version=1) == []
    give(world, current, 1)
    with Bells(world, behind, current) as bells:
        world.enqueue(world.request("newer"))
        assert bells.rung() == [behind]
        assert world.take(behind, 100, version=1) == []
        assert bells.rung() == [current]
        assert world.take(current, 100) == ["newer"]


def test_an_engine_that_leaves_some_wakes_the_next(world: World) -> None:
    first, second = sharers(world, 2)
    with Bells(world, first, second) as bells:
        world.enqueue(*(world.request() for _ in range(6)))
        bells.rung()
        assert len(world.take(first, 100)) == 3
        assert bells.rung() == [second]
        assert len(world.take(second, 100)) == 3
        assert bells.rung() == []


def test_wake_ups_alone_bring_all_requests_to_engines(world: World) -> None:
    """No engine looks by itself: each asks when it is woken, and again after it got some."""
    chance = random.Random(3)
    engines = sharers(world, 24)
    seats = {engine: chance.randint(1, 12) for engine in engines}

    def ask(engine: Engine) -> None:
        while True:
            places = seats[engine] - len(engine.running)
            if not world.take(engine, places, places):
                return

    with Bells(world, *engines) as bells:
        for engine in engines:
            ask(engine)
        for _ in range(10):
            free = sum(seats.values()) - sum(len(engine.running) for engine in engines)
            world.enqueue(*(world.request() for _ in range(chance.randint(1, free))))
            while woken := set(bells.rung()):
                for engine in sorted(woken, key=lambda engine: int(engine.slot)):
                    ask(engine)
            assert world.queued() == []
            for engine in engines:
                world.end(engine, *chance.sample(engine.running, chance.randint(0, len(engine.running))))
                ask(engine)
    world.check_integrity()


def test_the_engine_that_can_run_many_choices_takes_them_whatever_the_lower_ones_have(world: World) -> None:
    """More engines are lower than a share is reckoned with."""
    (large,) = sharers(world, 1)
    give(world, large, 12)
    small = sharers(world, 12)
    for engine in small:
        assert world.take(engine, 2) == []
    world.enqueue(world.request("many", n=8))
    with Bells(world, large, *small) as bells:
        assert world.take(small[0], 2) == []
        assert bells.rung() == [large]
        assert world.take(large, 100) == ["many"]


def test_a_take_costs_the_same_among_few_engines_and_many(world: World) -> None:
    def commands_of_a_request() -> int:
        before = _num_commands(world)
        world.enqueue(world.request())
        assert len(world.take(engines[-1], 100)) == 1
        return _num_commands(world) - before

    engines = sharers(world, 20)
    among_few = commands_of_a_request()
    engines += sharers(world, 180)
    assert commands_of_a_request() <= among_few


def _num_commands(world: World) -> int:
    """Calls, those within scripts too."""
    return sum(stats["calls"] for stats in world.raw.info("commandstats").values())
