"""take.lua counts choices, and leaves prompts to engines whose KV cache has room for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.bus import transitions
from tests.engine.bus.ledger_world import Engine, World


@pytest.fixture
def world(each_redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(transitions, "SHARE_TTL", 60.0)
    with World(each_redis_url) as world:
        yield world


def sharers(world: World, *rooms: int) -> list[Engine]:
    """Engines with 100 places that have just asked, and said their rooms."""
    engines = [world.engine() for _ in rooms]
    for engine, room in zip(engines, rooms, strict=True):
        assert world.take(engine, 100, room=room) == []
    return engines


def test_a_request_of_many_choices_counts_as_many(world: World) -> None:
    first, second = sharers(world, 1000, 1000)
    world.enqueue(world.request("many", n=8), *(world.request(f"r{number}") for number in range(8)))
    assert world.take(first, 100) == ["many"]
    assert len(world.take(second, 100)) == 8
    world.check_integrity()


def test_no_more_choices_are_taken_than_asked_for(world: World) -> None:
    (engine,) = sharers(world, 1000)
    world.enqueue(*(world.request(f"r{number}", n=3) for number in range(4)))
    assert world.take(engine, 5) == ["r0", "r1"], "the last one whole"
    assert world.take(engine, 1) == ["r2"]


def test_choices_go_to_the_engine_with_places_for_all_of_them(world: World) -> None:
    small, large = sharers(world, 1000, 1000)
    world.take(small, 2)
    world.enqueue(world.request("many", n=8))
    assert world.take(small, 2) == []
    assert world.take(large, 100) == ["many"]
    world.enqueue(world.request("more", n=500))
    assert world.take(small, 2) == ["more"], "no engine has places for all"
    world.check_integrity()


def test_a_prompt_goes_to_the_engine_with_room_for_it(world: World) -> None:
    short, other = sharers(world, 50, 5000)
    world.enqueue(world.request("long", tokens=100), world.request("b", tokens=40), world.request("c", tokens=40))
    assert world.take(short, 100, room=50) == []
    assert world.take(other, 100, room=5000) == ["long", "b", "c"]
    world.check_integrity()


def test_room_is_used_up_by_what_is_taken(world: World) -> None:
    """One prompt stands in line beyond the room: its engine goes on with it at once when blocks are freed."""
    (engine,) = sharers(world, 100)
    world.enqueue(*(world.request(f"r{number}", tokens=40) for number in range(6)))
    assert world.take(engine, 100, room=100) == ["r0", "r1", "r2"]
    assert world.take(engine, 100, room=-20) == []
    assert world.take(engine, 100, room=20) == ["r3"]


def test_an_idle_engine_takes_what_no_engine_has_room_for(world: World) -> None:
    """It ends such a request with a clear error, where it waited for ever."""
    first, _ = sharers(world, 50, 50)
    world.enqueue(world.request("huge", tokens=100))
    assert world.take(first, 100, room=0) == ["huge"]


def test_an_engine_that_died_is_in_nobodys_way(world: World) -> None:
    short, roomy = sharers(world, 50, 5000)
    world.crash(roomy)
    world.enqueue(world.request("long", tokens=100))
    assert world.take(short, 100, room=50) == ["long"]


def test_orphans_wait_for_room_too(world: World) -> None:
    first, other = sharers(world, 1000, 1000)
    world.enqueue(world.request("a", tokens=10), world.request("b", tokens=100))
    assert world.take(first, 100) == ["a"] and world.take(other, 100) == ["b"]
    world.replace(first)
    assert world.take(other, 100, room=0) == [], "what it has comes first"
    assert world.take(other, 100, room=50) == ["a"]
    world.check_integrity()
