"""takeover.lua: what a dead engine had in flight waits again; it ends only when engine after engine died of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from engine.bus import failover, journals, keys, leases, transitions
from engine.bus.call import Call, Fenced
from engine.bus.connection import Bus
from engine.bus.enqueue import Enqueued
from engine.bus.failover import TAKEOVER_BATCH, TakenOver
from engine.bus.journals import OutputPart
from engine.bus.queue_depth import queue_depth
from engine.protocol import FinishReason, RequestEnded
from tests.engine.bus.ledger_world import Engine, Listener, World, engine_info
from tests.engine.bus.lossy_proxy import LossyProxy


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def test_what_was_in_flight_waits_and_nobody_is_told(world: World) -> None:
    world.enqueue(world.request("a", tokens=9), world.request("b", n=2), world.request("c"))
    engine = world.engine()
    world.take(engine, 2)
    world.bus.run(world.flush_call(engine, started=[("a", {"scheduled": "1.5", "first_token": "1.6"})]))
    world.crash(engine)
    with Listener(world) as listener:
        assert world.take_over(engine) == TakenOver(orphaned=2, ended=0)
        assert not listener.raw
    assert [world.record(name).state for name in "abc"] == ["queued", "queued", "queued"]
    assert world.queued() == ["c"]
    assert (world.record("a").attempts, world.record("a").first_token, world.record("c").attempts) == (1, 1.6, 0)
    assert world.bus.run(queue_depth(world.model)).live == 3
    assert world.pending() == {} and world.usage_lines() == []
    world.check_integrity()


def test_orphans_are_taken_first_by_priority_then_age(world: World) -> None:
    engine = world.engine()
    world.enqueue(*(world.request(name, priority=priority) for name, priority in (("a", 5), ("b", -1), ("c", 5))))
    assert world.take(engine, 3) == ["b", "a", "c"]
    world.enqueue(world.request("urgent", priority=-100))
    heir = world.replace(engine)
    assert world.take(heir, 4) == ["b", "a", "c", "urgent"]
    world.end(heir, *"abc")
    world.check_integrity()


@pytest.mark.parametrize("sure", [False, True])
def test_a_heartbeat_refutes_all_but_the_supervisor(world: World, sure: bool) -> None:
    engine = world.running("a")
    assert world.take_over(engine, sure=sure) == TakenOver(int(sure), 0)
    assert world.record("a").state == ("queued" if sure else "running")
    assert len(world.bus.run(leases.engines(world.model))) == (0 if sure else 1)
    if not sure:
        world.end(engine, "a")
    world.check_integrity()


def calls_of(world: World, engine: Engine) -> list[Call[object]]:
    """Everything that only a slot's owner may do."""
    place = (world.model, engine.slot, engine.incarnation)
    return [
        world.take_call(engine, 5),
        world.flush_call(engine, ["a"], messages=[("api-1", b"ghost")]),
        journals.checkpoint(*place, [OutputPart("a", b"ghost")], 1),
        failover.reconcile(*place, "f", []),
        failover.rebuild(*place, "f", []),
        transitions.reject(*place, "1-1", "ghost"),
        leases.beat(*place, engine_info()),
    ]


def test_an_engine_that_comes_back_too_late_may_do_nothing(world: World) -> None:
    """Whether its slot is vacant or has another owner by now."""
    zombie = world.running("a")
    world.crash(zombie)
    world.take_over(zombie)
    for vacant in (True, False):
        for call in calls_of(world, zombie):
            with pytest.raises(Fenced):
                world.bus.run(call)
        if vacant:
            heir = world.engine()
            assert heir.slot == zombie.slot
            assert world.take(heir) == ["a"]
    assert not world.raw.exists(keys.journal(world.model, f"{zombie.slot}:{zombie.incarnation}"))
    world.end(heir, "a")
    world.check_integrity()


def live_and_die(world: World, **how: bool) -> TakenOver:
    """An engine takes `a` and dies."""
    engine = world.engine()
    assert world.take(engine) == ["a"]
    world.crash(engine)
    return world.take_over(engine, **how)


def test_the_third_death_in_a_row_ends_a_request_with_an_error(world: World) -> None:
    request = world.request("a")
    world.enqueue(request)
    with Listener(world) as listener:
        assert [live_and_die(world) for _ in range(3)] == [(1, 0), (1, 0), (0, 1)]
        (told,) = listener.wait_for(1)
    error = "The engines that ran this request died, one after the other."
    assert told == RequestEnded("a", request.handle, FinishReason.ERROR, error)
    record = world.record("a")
    assert (record.state, record.reason, record.error, record.attempts) == ("ended", "error", error, 3)
    world.check_integrity()


def test_output_clears_the_row_and_the_eighth_death_ends_it_all_the_same(world: World) -> None:
    world.enqueue(world.request("a"))
    for death in range(1, 9):
        engine = world.engine()
        assert world.take(engine) == ["a"]
        assert world.checkpoint(engine, "a", remark="well") == 1
        assert world.record("a").attempts == 0
        world.crash(engine)
        assert world.take_over(engine) == (TakenOver(1, 0) if death < 8 else TakenOver(0, 1))
        assert (world.record("a").attempts, world.record("a").deaths) == (1, death)
    world.check_integrity()


def test_an_engine_that_was_told_to_stop_blames_nothing(world: World) -> None:
    world.enqueue(world.request("a"))
    assert [live_and_die(world, sure=True, blame=False) for _ in range(9)] == [(1, 0)] * 9
    assert (world.record("a").attempts, world.record("a").deaths) == (0, 0)
    world.check_integrity()


def test_more_than_a_batch(world: World) -> None:
    count = 2 * TAKEOVER_BATCH + 1
    engine = world.engine()
    world.enqueue(*(world.request() for _ in range(count)))
    world.take(engine, count)
    world.crash(engine)
    assert world.take_over(engine) == TakenOver(count, 0)
    assert world.take_over(engine) == TakenOver(0, 0), "the second observer finds nothing"
    world.check_integrity()


def take_over_two_and_die(world: World, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch of an observer that never sends the second."""
    world.crash(engine)
    with monkeypatch.context() as patch:
        patch.setattr(failover, "TAKEOVER_BATCH", 2)
        call = failover.takeover(world.model, engine.slot, engine.incarnation)
    orphaned, ended, rest = world.raw.execute_command(*call.eval())
    assert (orphaned, ended) == (2, 0) and rest
    world.check_integrity()


def test_the_rest_of_an_observer_that_died_is_the_next_ones(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = world.running(*(f"q{number}" for number in range(5)))
    take_over_two_and_die(world, engine, monkeypatch)
    heir = world.engine()
    assert heir.slot == engine.slot
    assert world.take(heir, 2) == ["q0", "q1"]
    assert world.take_over(engine) == TakenOver(3, 0)
    assert list(world.pending().values()) == [heir.slot] * 2, "the heir keeps its own"
    world.check_integrity()


def test_a_vacant_slot_with_entries_is_named_until_it_has_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = world.running("a", "b", "c")
    take_over_two_and_die(world, engine, monkeypatch)
    (dead,) = world.bus.run(leases.dead_engines(world.model, ttl=60.0))
    assert dead.slot == engine.slot and dead.incarnation > engine.incarnation
    assert world.bus.run(failover.takeover(world.model, *dead)) == TakenOver(1, 0)
    assert world.bus.run(leases.dead_engines(world.model, ttl=60.0)) == []
    world.check_integrity()


def test_observers_at_once_count_one_death(world: World) -> None:
    engine = world.running(*(f"q{number}" for number in range(100)))
    world.crash(engine)
    left: list[TakenOver] = []
    threads = [threading.Thread(target=lambda: left.append(world.take_over(engine))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(each.orphaned for each in left) == 100
    assert {record["attempts"] for record in world.records().values()} == {"1"}
    world.check_integrity()


def test_a_lost_answer_counts_one_death(world: World) -> None:
    engine = world.running("a")
    world.crash(engine)
    with LossyProxy(world.url) as proxy, Bus(proxy.url) as bus:
        bus.run(queue_depth(world.model))
        proxy.losses = 1
        assert bus.run(failover.takeover(world.model, engine.slot, engine.incarnation)) == TakenOver(0, 0)
        assert proxy.lost == 1
    assert world.record("a").attempts == 1
    world.check_integrity()


def test_the_requests_of_a_successor_in_the_same_slot_are_left_alone(world: World) -> None:
    """Its predecessor was stopped, not dead, and is declared so again."""
    world.enqueue(*(world.request() for _ in range(300)))
    first = world.engine()
    world.take(first, 100)
    second = world.replace(first)
    world.take(second, 200)
    assert second.slot == first.slot
    world.raw.hset(keys.record(world.model, "r200"), "incarnation", first.incarnation)  # as between two batches
    assert world.take_over(first, sure=True) == TakenOver(1, 0)
    assert [len(world.pending()), world.record("r200").state] == [199, "queued"]
    world.end(second, "r1")
    world.check_integrity()


def test_an_entry_that_was_trimmed_away_ends_its_request_when_it_is_taken(world: World) -> None:
    engine = world.engine()
    outcome = world.enqueue(world.request("a"), world.request("b"))
    assert isinstance(outcome, Enqueued)
    world.take(engine, 2)
    world.raw.xdel(keys.requests(world.model), outcome.entries[0])
    heir = world.replace(engine)
    assert world.take(heir, 2) == ["b"]
    assert (world.record("a").state, world.record("a").reason) == ("ended", "error")
    world.check_integrity()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_entries_of_which_nothing_is_known_are_cleared_away(world: World, is_replaced: bool) -> None:
    """Unless they may be a living engine's."""
    engine = world.running("a")
    world.raw.delete(keys.record(world.model, "a"))
    world.crash(engine)
    if is_replaced:
        world.raw.set(keys.owner(world.model, engine.slot), engine.incarnation + 1)
    assert world.take_over(engine) == TakenOver(0, 0)
    assert (len(world.entries()), len(world.pending())) == ((1, 1) if is_replaced else (0, 0))


@pytest.mark.parametrize("act", [World.crash, lambda world, engine: None])
def test_a_slot_that_was_left_is_the_next_engines(world: World, act: Callable[[World, Engine], None]) -> None:
    engine = world.running("a")
    world.flush_call(engine)
    act(world, engine)
    world.take_over(engine, sure=True)
    heir = world.engine()
    assert heir.slot == engine.slot and heir.incarnation > engine.incarnation
    assert world.take(heir) == ["a"], "its calls are numbered anew"
    world.end(heir, "a")
    world.check_integrity()


def test_an_unknown_model_has_no_requests(world: World) -> None:
    assert world.bus.run(failover.takeover("nobody", "0", 1)) == TakenOver(0, 0)
