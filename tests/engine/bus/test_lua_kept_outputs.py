"""Outputs of ended requests have a budget of bytes and give way to new requests; what an end costs does not grow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from engine.bus import journals, keys, records, transitions
from engine.bus.enqueue import Enqueued
from engine.bus.journals import EndedRequest
from engine.bus.records import OUTPUT_DROPPED
from engine.protocol import Abort, FinishReason, RequestFacts
from tests.engine.bus.ledger_world import Engine, World


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def end_large(world: World, engine: Engine, name: str, size: int, budget: int) -> None:
    world.enqueue(world.request(name))
    world.take(engine)
    number = next(engine.flushes)
    ended = [EndedRequest(name, FinishReason.STOP, bytes(size), output_tokens=1)]
    place = (world.model, engine.slot, engine.incarnation)
    world.bus.run(journals.flush(*place, number - 1, number, ended=ended, kept_bytes=budget))


def has_output(world: World, name: str) -> bool:
    return bool(world.raw.hexists(keys.record(world.model, name), "output"))


def test_the_oldest_outputs_go_when_the_budget_is_spent(world: World) -> None:
    engine = world.engine()
    names = [f"r{number}" for number in range(5)]
    for name in names:
        end_large(world, engine, name, size=1000, budget=2500)
    assert [has_output(world, name) for name in names] == [False, False, False, True, True]
    assert [world.record(name).output_dropped for name in names] == [True, True, True, False, False]
    stored = world.bus.run(records.stored_output(world.model, "r0"))
    assert stored is not None and [choice.error for choice in stored.choices] == [OUTPUT_DROPPED]
    end_large(world, engine, "too large", size=3000, budget=2500)
    assert not any(has_output(world, name) for name in [*names, "too large"])
    assert int(world.raw.hget(keys.load(world.model), "kept") or 0) == 0
    world.check_integrity()


def test_an_output_whose_record_is_gone_takes_no_room(world: World) -> None:
    engine = world.engine()
    for name in ("x", "y", "z"):
        end_large(world, engine, name, size=1000, budget=10_000)
        world.raw.delete(keys.record(world.model, name))
    for name in ("a", "b"):
        end_large(world, engine, name, size=1000, budget=10_000)
    assert int(world.raw.hget(keys.load(world.model), "kept") or 0) < 3000
    assert [line.decode().split()[1] for line in world.raw.lrange(keys.kept(world.model), 0, -1)] == ["a", "b"]
    assert not world.raw.exists(keys.record(world.model, "z")), "nothing of it is left"


def test_old_outputs_give_way_when_memory_is_short(world: World) -> None:
    engine = world.engine()
    names = [f"r{number}" for number in range(20)]
    for name in names:
        end_large(world, engine, name, size=1 << 20, budget=1 << 30)
    used = world.raw.info("memory")["used_memory"]
    world.raw.config_set("maxmemory", int((used - (2 << 20)) / 0.8))  # two outputs more than new requests are admitted with
    try:
        assert isinstance(world.enqueue(world.request("new")), Enqueued)
    finally:
        world.raw.config_set("maxmemory", 0)
    left = [has_output(world, name) for name in names]
    assert left == sorted(left) and 15 < sum(left) < 20, "the oldest, and no more than was needed"


def commands(world: World) -> int:
    """That Redis ran so far, those of scripts among them."""
    return sum(each["calls"] for each in world.raw.info("commandstats").values())


def cost_of_an_end(world: World, engine: Engine) -> int:
    before = commands(world)
    world.end(engine, engine.running[0])
    return commands(world) - before


def test_an_end_costs_the_same_whatever_shares_its_clients_id(world: World) -> None:
    engine = world.engine()
    world.enqueue(*(world.request() for _ in range(10)))
    world.take(engine, 10)
    world.end(engine, engine.running[0])
    few = cost_of_an_end(world, engine)
    for _ in range(8):
        world.enqueue(*(world.request() for _ in range(250)))
    world.take(engine, 2000)
    many = [cost_of_an_end(world, engine) for _ in range(5)]
    assert max(many) <= few + 2
    world.end(engine, *engine.running)
    world.check_integrity()


def test_a_large_outline_counts_though_its_request_never_ran(world: World) -> None:
    engine = world.engine()
    facts = RequestFacts(kept_body=bytes(20_000))
    world.enqueue(replace(world.request("large"), facts=facts), world.request("small"))
    for name in ("large", "small"):
        world.bus.run(transitions.finish(world.model, name, Abort(name)))
    assert [line.decode().split()[1] for line in world.raw.lrange(keys.kept(world.model), 0, -1)] == ["large"]
    assert int(world.raw.hget(keys.load(world.model), "kept") or 0) > 20_000
    end_large(world, engine, "newer", size=1000, budget=15_000)
    assert world.record("large").output_dropped and not world.record("small").output_dropped
    assert has_output(world, "newer")
    world.check_integrity()


def test_a_hidden_answer_is_dropped_once_its_request_has_ended(world: World) -> None:
    engine = world.engine()
    world.enqueue(world.request("early"))
    world.take(engine)
    assert world.bus.run(records.hide(world.model, "early")) == "running"
    assert world.record("early").hidden and not world.record("early").output_dropped
    end_large(world, engine, "late", size=1000, budget=10_000)
    for _ in range(2):
        assert world.bus.run(records.hide(world.model, "late")) == "ended"
        assert world.record("late").hidden and world.record("late").must_run_again and not has_output(world, "late")
        assert world.bus.run(records.outlines(world.model, ["late"])) == [None]
    assert world.bus.run(records.hide(world.model, "gone")) == "unknown"
    world.check_integrity()
