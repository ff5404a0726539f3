"""ledger.lua: the one way out of the ledger, which all scripts that end a request take."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from engine.bus import failover, keys, transitions
from tests.engine.bus.ledger_world import World
from tests.waiting import wait_for

RETENTION = 7200.0
OTHER_RETENTION = 60.0


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def flush(world: World) -> None:
    engine = world.engine()
    world.take(engine)
    world.end(engine, "a")


def finish(world: World) -> None:
    assert world.finish("a").state == "queued"


def reject(world: World) -> None:
    engine = world.engine()
    (taken,) = world.bus.run(world.take_call(engine))
    world.bus.run(transitions.reject(world.model, engine.slot, engine.incarnation, taken.entry, "cannot be read"))


def takeover(world: World) -> None:
    for ended in (0, 0, 1):
        engine = world.engine()
        world.take(engine)
        world.crash(engine)
        assert world.take_over(engine).ended == ended


def expire_orphans(world: World) -> None:
    engine = world.engine()
    world.take(engine)
    world.take_over(engine, sure=True)
    world.raw.delete(keys.served_by(world.model, engine.fingerprint))
    assert wait_for(lambda: world.bus.run(failover.expire_orphans(world.model, 0.001)), "the end of the failover time") == 1


def take_of_a_lost_entry(world: World) -> None:
    world.raw.xtrim(keys.requests(world.model), maxlen=0)
    assert world.take(world.engine()) == []


@pytest.mark.parametrize("end", [flush, finish, reject, takeover, expire_orphans, take_of_a_lost_entry])
@pytest.mark.parametrize("retention", [RETENTION, OTHER_RETENTION])
def test_every_end_keeps_the_record_for_the_retention_of_its_request(
    world: World, end: Callable[[World], None], retention: float
) -> None:
    world.enqueue(world.request("a"), retention=retention)
    end(world)
    assert world.record("a").state == "ended"
    for key in (keys.record(world.model, "a"), keys.external(world.model, "ext")):
        assert retention - 30 < world.raw.pttl(key) / 1000 <= retention


def test_a_client_given_id_is_found_until_the_last_record_under_it_is_gone(world: World) -> None:
    world.enqueue(world.request("long"), retention=RETENTION)
    world.finish("long")
    world.enqueue(world.request("short"), retention=OTHER_RETENTION)
    world.finish("short")
    assert world.raw.pttl(keys.external(world.model, "ext")) / 1000 > RETENTION - 30


def test_a_record_of_a_version_that_wrote_no_retention_is_kept_for_an_hour(world: World) -> None:
    world.enqueue(world.request("a"))
    world.raw.hdel(keys.record(world.model, "a"), "retention")
    world.finish("a")
    assert 3570 < world.raw.pttl(keys.record(world.model, "a")) / 1000 <= 3600
    world.check_integrity()
