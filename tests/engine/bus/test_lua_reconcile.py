"""reconcile.lua and rebuild.lua: an engine and Redis agree on what is in flight, after Redis came back with less."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.bus import keys, leases
from engine.bus.call import Unowned
from engine.bus.enqueue import Enqueued
from engine.bus.failover import Difference
from engine.protocol import decode_request
from tests.engine.bus.ledger_world import Engine, World

SAME = Difference([], [], 0)


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def wipe(world: World, engine: Engine) -> None:
    """As `SlotOwner` does it, the engine then owns its slot again."""
    world.raw.flushall()
    with pytest.raises(Unowned):
        world.reconcile(engine)
    world.bus.run(leases.reclaim_slot(world.model, engine.slot, engine.incarnation, ttl=60.0))


def test_where_both_agree_nothing_happens(world: World) -> None:
    world.enqueue(world.request("a"), world.request("b"), world.request("queued"))
    engine = world.engine()
    world.take(engine, 2)
    for _ in range(2):
        assert world.reconcile(engine, "a", "b") == SAME
    world.check_integrity()


def test_a_take_that_was_rolled_back_is_done_again(world: World) -> None:
    world.enqueue(world.request("a", n=2, tenant="t"), world.request("b"))
    engine = world.engine()
    world.roll_back_over(lambda: world.take(engine))
    assert (world.record("a").state, engine.running) == ("queued", ["a"])
    assert world.reconcile(engine, "a") == SAME
    assert (world.record("a").state, world.record("a").incarnation) == ("running", engine.incarnation)
    assert world.queued() == ["b"]
    world.check_integrity()


def test_a_take_of_an_orphan_that_was_rolled_back_is_done_again(world: World) -> None:
    engine = world.running("a")
    heir = world.replace(engine)
    world.roll_back_over(lambda: world.take(heir))
    assert world.reconcile(heir, "a") == SAME
    assert world.record("a").state == "running"
    world.check_integrity()
    world.end(heir, "a")
    world.check_integrity()


def test_what_another_engine_has_or_what_ended_is_to_be_dropped(world: World) -> None:
    """Rolled back, and then taken by another engine or aborted, before this one looked."""
    world.enqueue(world.request("taken"), world.request("aborted"), world.request("mine"))
    first, second = world.engine(), world.engine()
    world.roll_back_over(lambda: world.take(first, 3))
    assert world.take(second) == ["taken"]
    world.finish("aborted")
    assert world.reconcile(first, "taken", "aborted", "mine") == Difference([], ["taken", "aborted"], 0)
    assert world.record("mine").engine == first.slot
    world.end(second, "taken")
    world.check_integrity()


def test_what_the_engine_does_not_hold_waits_again_at_once(world: World) -> None:
    """Its end was rolled back, say. Nobody died of it."""
    engine = world.running("a", "b")
    world.roll_back_over(lambda: world.end(engine, "a"))
    assert world.reconcile(engine, "b") == Difference([], [], returned=1)
    assert (world.record("a").state, world.record("a").attempts) == ("queued", 0)
    world.check_integrity()
    assert world.take(engine) == ["a"]
    world.end(engine, "a", "b")
    world.check_integrity()


def test_requests_of_a_successor_are_not_returned(world: World) -> None:
    world.enqueue(world.request("a"))
    engine = world.engine()
    heir = world.replace(engine)
    world.take(heir)
    assert world.reconcile(heir, "a") == SAME
    world.raw.hset(keys.record(world.model, "a"), "incarnation", heir.incarnation - 1)
    assert world.reconcile(heir).returned == 0, "takeover's"


def test_an_ended_request_may_be_named_as_running_to_be_ended_again(world: World) -> None:
    engine = world.running("a")
    end = world.flush_call(engine, ["a"])
    world.roll_back_over(lambda: world.bus.run(end))
    assert world.reconcile(engine, "a") == SAME
    world.bus.run(end)
    assert world.record("a").state == "ended"
    world.check_integrity()


def test_after_a_wipe_an_engine_puts_its_requests_back(world: World) -> None:
    requests = [world.request("a", tokens=7, n=2, tenant="t", priority=3), world.request("b")]
    world.enqueue(*requests)
    engine = world.engine()
    world.take(engine, 2)
    wipe(world, engine)
    assert world.reconcile(engine, "a", "b") == Difference(["a", "b"], [], 0)
    assert world.rebuild(engine, *requests) == set()
    record = world.record("a")
    assert (record.state, record.engine, record.n, record.tenant, record.prompt_tokens) == ("running", engine.slot, 2, "t", 7)
    world.check_integrity()
    assert world.reconcile(engine, "a", "b") == SAME
    heir = world.replace(engine)
    taken = world.bus.run(world.take_call(heir, 2))
    assert [decode_request(each.payload) for each in taken] == [requests[1], requests[0]]
    world.check_integrity()


def test_rebuilding_twice_makes_one_request(world: World) -> None:
    request = world.request("a")
    engine = world.running(request)
    wipe(world, engine)
    for _ in range(2):
        assert world.rebuild(engine, request) == set()
        assert world.reconcile(engine, "a") == SAME
        world.check_integrity()
    world.end(engine, "a")
    assert world.rebuild(engine, request) == set()
    assert world.reconcile(engine, "a") == Difference([], ["a"], 0), "it has ended"
    world.check_integrity()


def test_what_its_api_server_enqueued_again_is_the_engines_that_holds_it(world: World) -> None:
    """After a wipe, between the engine's look and its putting back."""
    request = world.request("a", n=2)
    engine = world.running(request)
    wipe(world, engine)
    assert world.reconcile(engine, "a").unknown == ["a"]
    world.enqueue(request)
    assert world.rebuild(engine, request) == set()
    assert world.queued() == ["a"]
    assert world.reconcile(engine, "a") == SAME
    assert (world.queued(), world.record("a").state) == ([], "running")
    world.check_integrity()
    world.end(engine, "a")
    world.check_integrity()


def test_a_request_that_was_put_back_under_another_entry_is_still_held(world: World) -> None:
    """The engine knows ids alone: which entry is whose, only Redis says."""
    request = world.request("a")
    engine = world.running(request)
    old = world.record("a").entry
    wipe(world, engine)
    world.rebuild(engine, request)
    assert world.record("a").entry != old
    world.raw.xack(keys.requests(world.model), keys.GROUP, world.record("a").entry)
    assert world.reconcile(engine, "a") == SAME
    assert world.pending() == {world.record("a").entry: engine.slot}
    world.check_integrity()


def test_what_was_aborted_while_redis_had_forgotten_it_is_not_rebuilt(world: World) -> None:
    request = world.request("a")
    engine = world.running(request)
    wipe(world, engine)
    world.finish("a")
    assert world.rebuild(engine, request) == {"a"}
    world.check_integrity()


@pytest.mark.parametrize("was_taken", [False, True])
def test_a_request_whose_entry_is_gone_is_rebuilt(world: World, was_taken: bool) -> None:
    request = world.request("a")
    outcome = world.enqueue(request, world.request("b"))
    assert isinstance(outcome, Enqueued)
    engine = world.engine()
    if was_taken:
        world.take(engine)
        world.raw.xack(keys.requests(world.model), keys.GROUP, outcome.entries[0])
    else:
        world.roll_back_over(lambda: world.take(engine))
    world.raw.xdel(keys.requests(world.model), outcome.entries[0])
    assert world.reconcile(engine, "a") == Difference(["a"], [], 0)
    assert world.rebuild(engine, request) == set()
    assert world.record("a").state == "running"
    world.check_integrity()


def test_a_group_that_was_destroyed_comes_back_with_what_is_pending(world: World) -> None:
    engine, other = world.running("a"), world.running("b")
    world.enqueue(world.request("new"))
    for step in (
        lambda: world.take(engine),
        lambda: world.reconcile(engine, "a", "new"),
        lambda: world.take_over(other, sure=True),
    ):
        world.raw.xgroup_destroy(keys.requests(world.model), keys.GROUP)
        step()
    assert [world.record(name).state for name in ("a", "new", "b")] == ["running", "running", "queued"]
    world.end(engine, "a", "new")
    world.check_integrity()
