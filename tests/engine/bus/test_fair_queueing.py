"""The order set between tenants: start-time fair queueing over a real Redis, by priority first, then virtual start."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from engine.bus import journals, keys
from engine.bus.queue_place import prioritize
from engine.protocol import EngineCoreRequest, FinishReason, RequestFacts
from tests.engine.bus.ledger_world import Engine, World, ended_request


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def flood(world: World, tenant: str, count: int, **fields: int) -> list[str]:
    names = [f"{tenant}{number:03}" for number in range(count)]
    for name in names:
        world.enqueue(world.request(name, tenant=tenant, **fields))
    return names


def virtual(world: World, field: str) -> int:
    return int(world.raw.hget(keys.fair(world.model), field) or 0)


def run_to_end(world: World, engine: Engine, request_id: str, output_tokens: int) -> None:
    end = dataclasses.replace(ended_request(request_id), output_tokens=output_tokens, cached_tokens=0)
    number = next(engine.flushes)
    world.bus.run(journals.flush(world.model, engine.slot, engine.incarnation, number - 1, number, ended=[end]))


def test_two_backlogs_are_taken_in_turns(world: World) -> None:
    flood(world, "a", 20, tokens=10)
    flood(world, "b", 5, tokens=10)
    assert [name[0] for name in world.queued()[:10]] == list("ab" * 5)
    world.check_integrity()


def test_within_a_tenant_requests_stay_in_the_order_of_their_arrival(world: World) -> None:
    names = flood(world, "a", 12, tokens=10)
    for name in (names[0], names[5], names[6], names[7]):
        world.finish(name)
    late = flood(world, "a", 14, tokens=1)[12:]
    kept = [name for name in names if name not in (names[0], names[5], names[6], names[7])]
    assert world.queued() == [*kept, *late]
    world.check_integrity()


def test_a_tenant_that_comes_newly_begins_where_the_others_are(world: World) -> None:
    """What it did not use before is not its to claim, and what the others used before is not held against them."""
    engine = world.engine()
    for name in flood(world, "a", 30, tokens=10, max_tokens=4):
        world.take(engine)
        world.end(engine, name)
    flood(world, "a", 40, tokens=10, max_tokens=4)
    world.take(engine, 3)
    world.enqueue(world.request("b", tenant="b", tokens=10, max_tokens=4))
    assert world.queued()[0] == "b"
    flood(world, "b", 4, tokens=10, max_tokens=4)
    assert Counter(name[0] for name in world.queued()[:8]) == {"a": 4, "b": 4}


def test_longer_prompts_are_charged_more(world: World) -> None:
    flood(world, "a", 40, tokens=984)  # 1000 with the output that is expected
    flood(world, "b", 40, tokens=234)  # 250
    assert 3.5 <= Counter(name[0] for name in world.queued()[:40])["b"] / 8 <= 4.5


def test_a_weight_is_a_share(world: World) -> None:
    for number in range(40):
        for tenant, weight in (("a", 1.0), ("b", 3.0)):
            request = world.request(f"{tenant}{number:03}", tenant=tenant)
            world.enqueue(replace(request, facts=replace(request.facts, weight=weight)))
    assert Counter(name[0] for name in world.queued()[:40]) == {"a": 10, "b": 30}
    world.check_integrity()


def test_outputs_are_charged_at_their_end_and_expected_from_then_on(world: World) -> None:
    engine = world.engine()
    (name,) = flood(world, "a", 1, tokens=10)
    before = virtual(world, "finish:a")
    world.take(engine)
    run_to_end(world, engine, name, output_tokens=500)
    assert virtual(world, "finish:a") == 510 > before
    assert float(world.raw.hget(keys.fair(world.model), "mean:a") or 0) == 500
    world.enqueue(world.request("next", tokens=10, tenant="a", max_tokens=1000))
    assert virtual(world, "finish:a") == 510 + 510
    world.check_integrity()


@pytest.mark.parametrize("state", ["queued", "running"])
def test_an_abort_gives_back_what_was_not_used(world: World, state: str) -> None:
    engine = world.engine()
    (name,) = flood(world, "a", 1, tokens=100)
    if state == "running":
        world.take(engine)
        run_to_end(world, engine, name, output_tokens=2)
    else:
        world.finish(name, reason=FinishReason.ABORT)
    assert virtual(world, "finish:a") == (102 if state == "running" else 0)


def test_priorities_come_before_shares_and_are_clamped(world: World) -> None:
    flood(world, "a", 3)
    for name, priority in (("late", 2**62), ("later", 2**63 - 1), ("first", -(2**63)), ("second", -600)):
        world.enqueue(world.request(name, tenant="b", priority=priority))
    assert world.queued() == ["first", "second", "a000", "a001", "a002", "late", "later"]
    assert world.record("late").priority == 2**62
    world.check_integrity()


def test_virtual_time_begins_again_while_nothing_waits(world: World) -> None:
    engine = world.engine()
    far = 2**39
    world.raw.hset(keys.fair(world.model), mapping={"clock": far, "finish:a": far + 50, "finish:b": 7})
    world.enqueue(world.request("a", tenant="a", tokens=2))
    assert (virtual(world, "clock"), virtual(world, "finish:b")) == (0, 0)
    assert world.raw.zscore(keys.order(world.model), world.raw.zrange(keys.order(world.model), 0, 0)[0]) == 50
    assert world.take(engine) == ["a"]
    world.check_integrity()


def test_a_place_is_kept_for_a_tenant_that_has_nothing_in_flight(world: World) -> None:
    """Its requests need not wait for the end of another tenant's."""
    engine = world.engine()
    flood(world, "a", 10)
    assert len(world.take(engine, 8)) == 8, "alone it may have all seats"
    world.enqueue(world.request("b", tenant="b"))
    world.end(engine, *engine.running[:2])
    assert world.take(engine, 2 + 4, places=2) == ["b", "a008"]
    assert world.take(engine, 4, places=0) == [], "a line would take the place of the next one of b"
    world.end(engine, "a002")
    assert world.take(engine, 1 + 4, places=1) == ["a009"], "b has its seat: the others are for all"
    world.end(engine, "b")
    world.enqueue(world.request("late", tenant="a"))
    assert world.take(engine, 1 + 4, places=1) == [], "it is kept"
    world.enqueue(world.request("b2", tenant="b"))
    assert world.take(engine, 1 + 4, places=1)[0] == "b2"
    world.check_integrity()


def test_a_place_is_kept_only_while_several_tenants_send_requests(world: World) -> None:
    engine = world.engine()
    flood(world, "a", 2)
    world.enqueue(world.request("b", tenant="b"))
    world.raw.hset(keys.fair(world.model), "changed", "1.5")
    flood(world, "c", 20)
    world.raw.hset(keys.fair(world.model), "changed", "1.5")
    assert len(world.take(engine, 8)) == 8
    world.end(engine, *list(engine.running))
    assert len(world.take(engine, 8)) == 8


def tiered(world: World, name: str, tier: str, **fields: Any) -> EngineCoreRequest:
    return world.request(name, **fields, facts=RequestFacts(external_id=name, tier=tier))


def test_service_tiers_come_before_priorities_and_shares(world: World) -> None:
    flood(world, "a", 3, tokens=10)
    world.enqueue(tiered(world, "late", "flex", tenant="a", priority=-512))
    for name in ("first", "second"):
        world.enqueue(tiered(world, name, "priority", tenant="b", priority=512))
    world.enqueue(*(tiered(world, f"list{place:02}", "flex", tenant="c") for place in range(40)))  # in slices, then at once
    assert world.queued()[:2] == ["first", "second"]
    assert world.queued()[2:5] == ["a000", "a001", "a002"]
    assert world.queued()[5] == "late", "its priority counts within its tier"
    assert len(world.queued()) == 46
    world.bus.run(prioritize(world.model, "late", 512))
    world.bus.run(prioritize(world.model, "second", -512))
    assert world.queued()[:2] == ["second", "first"]
    assert world.queued()[-1] == "late"
    world.check_integrity()


def test_orphans_keep_their_tier(world: World) -> None:
    engine = world.engine()
    for name, tier in (("a", "flex"), ("b", ""), ("c", "priority")):
        world.enqueue(tiered(world, name, tier))
    assert world.take(engine, 3) == ["c", "b", "a"]
    assert world.take(world.replace(engine), 3) == ["c", "b", "a"]
    world.check_integrity()
