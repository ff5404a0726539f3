"""prioritize.lua and places in the queue, over a real Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.bus.enqueue import Enqueued
from engine.bus.queue_place import num_before, prioritize
from tests.engine.bus.ledger_world import World


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def test_a_queued_request_moves(world: World) -> None:
    world.enqueue(*(world.request(name) for name in "abcd"))
    assert world.bus.run(prioritize(world.model, "c", -5)) == "queued"
    assert world.bus.run(prioritize(world.model, "a", 2**40)) == "queued"
    assert world.queued() == ["c", "b", "d", "a"]
    assert world.record("c").priority == -5
    world.check_integrity()
    (taken, *_) = world.bus.run(world.take_call(world.engine(), 1))
    assert taken.priority == -5, "its engine orders by it too"


def test_an_orphan_moves_among_the_orphans(world: World) -> None:
    engine = world.engine()
    world.enqueue(*(world.request(name) for name in "abc"))
    world.take(engine, 3)
    heir = world.replace(engine)
    assert world.bus.run(prioritize(world.model, "c", -1)) == "queued"
    assert world.take(heir, 3) == ["c", "a", "b"]
    world.check_integrity()


def test_what_runs_or_has_ended_does_not_move(world: World) -> None:
    engine = world.engine()
    world.enqueue(world.request("a"))
    world.take(engine)
    assert world.bus.run(prioritize(world.model, "a", -1)) == "running"
    world.end(engine, "a")
    assert world.bus.run(prioritize(world.model, "a", -1)) == "ended"
    assert world.bus.run(prioritize(world.model, "never", -1)) == "unknown"
    assert world.record("a").priority == 0
    world.check_integrity()


def test_places_count_what_waits_before(world: World) -> None:
    outcome = world.enqueue(*(world.request(name) for name in "abc"))
    assert isinstance(outcome, Enqueued)
    assert world.bus.run(num_before(world.model, outcome.entries)) == [0, 1, 2]
    world.take(world.engine())
    assert world.bus.run(num_before(world.model, outcome.entries)) == [None, 0, 1]
