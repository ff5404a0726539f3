"""expire_orphans.lua: the end of requests that no engine comes to continue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.bus import failover, keys
from engine.protocol import FinishReason, RequestEnded
from tests.engine.bus.ledger_world import Engine, Listener, World
from tests.waiting import wait_for

ERROR = "The engine that ran this request died, and no engine came to continue it."


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def orphans(world: World, fingerprint: str, *names: str) -> None:
    engine = world.engine()
    engine.fingerprint = fingerprint
    world.enqueue(*(world.request(name) for name in names))
    world.take(engine, len(names))
    world.take_over(engine, sure=True)


def forget_engines(world: World) -> None:
    """As when the failover time has passed since the last heartbeat."""
    world.raw.delete(keys.served(world.model), keys.served_by(world.model, "f"))


def expire(world: World, failover_timeout: float = 0.001, most: int = 100) -> int:
    return world.bus.run(failover.expire_orphans(world.model, failover_timeout, most))


def test_orphans_end_with_an_error_when_nobody_came_in_time(world: World) -> None:
    orphans(world, "f", "a")
    world.enqueue(world.request("never taken"))
    assert expire(world) == 0, "an engine lived lately"
    forget_engines(world)
    assert expire(world, failover_timeout=60.0) == 0, "it became an orphan lately"
    with Listener(world) as listener:
        assert wait_for(lambda: expire(world), "the failover time") == 1
        (told,) = listener.wait_for(1)
    assert isinstance(told, RequestEnded) and (told.request_id, told.reason, told.error) == ("a", FinishReason.ERROR, ERROR)
    assert (world.record("a").reason, world.record("a").error) == ("error", ERROR)
    assert world.queued() == ["never taken"]
    assert expire(world) == 0
    world.check_integrity()


def test_orphans_whose_engines_live_do_not_hide_those_whose_engines_are_gone(world: World) -> None:
    """However many they are: their engines are full."""
    orphans(world, "f", *(f"q{number}" for number in range(6)))
    orphans(world, "gone", "x", "y", "z")
    assert wait_for(lambda: expire(world, most=2), "the failover time") == 2
    assert expire(world, most=2) == 1
    assert {name for name, record in world.records().items() if record["state"] == "ended"} == {"x", "y", "z"}
    world.check_integrity()


def test_an_orphan_that_was_taken_does_not_end(world: World) -> None:
    orphans(world, "f", "a")
    heir: Engine = world.engine()
    assert world.take(heir) == ["a"]
    forget_engines(world)
    assert expire(world, failover_timeout=0.0) == 0
    world.end(heir, "a")
    world.check_integrity()
