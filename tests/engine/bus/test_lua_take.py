"""take.lua and reject.lua: one engine has a request, through lost answers, races, zombies and trimmed entries; fair shares."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from engine.bus import keys, leases, transitions
from engine.bus.call import BusUnavailable, Fenced, Unowned
from engine.bus.connection import Bus
from engine.bus.enqueue import Enqueued
from engine.bus.queue_depth import queue_depth
from engine.protocol import Abort, FinishReason, RequestEnded, decode_request
from tests.engine.bus.ledger_world import Engine, Listener, World
from tests.engine.bus.lossy_proxy import LossyProxy
from tests.waiting import wait_for


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def test_take_gives_requests_in_order_and_no_more_than_asked(world: World) -> None:
    world.enqueue(world.request("a"), world.request("b", priority=-1), world.request("c"))
    engine = world.engine()
    assert world.take(engine, 2) == ["b", "a"]
    record = world.record("b")
    assert (record.state, record.engine, record.incarnation) == ("running", engine.slot, engine.incarnation)
    assert record.received >= record.enqueued
    assert world.queued() == ["c"]
    world.check_integrity()


def test_take_of_an_empty_queue_gives_nothing(world: World) -> None:
    engine = world.engine()
    assert world.take(engine, 5) == []


def test_a_lost_answer_loses_no_request(world: World) -> None:
    world.enqueue(*(world.request() for _ in range(6)))
    engine = world.engine()
    with LossyProxy(world.url) as proxy, Bus(proxy.url) as bus:
        bus.run(queue_depth(world.model))
        proxy.losses = 1
        taken = bus.run(world.take_call(engine, 2))
        assert proxy.lost == 1
    assert [decode_request(each.payload).request_id for each in taken] == ["r1", "r2"]
    assert len(world.pending()) == 2
    world.check_integrity()


def test_take_run_again_after_a_lost_answer_gives_the_same_requests(world: World) -> None:
    world.enqueue(*(world.request() for _ in range(4)))
    engine = world.engine()
    call = world.take_call(engine, 2)
    with LossyProxy(world.url) as proxy, Bus(proxy.url, patience=0.3) as bus:
        bus.run(queue_depth(world.model))
        proxy.losses = 1_000
        with pytest.raises(BusUnavailable):
            bus.run(call)
    assert [decode_request(each.payload).request_id for each in world.bus.run(call)] == ["r1", "r2"]
    assert world.take(engine, 2) == ["r3", "r4"]
    world.check_integrity()


def test_racing_engines_share_without_overlap(world: World) -> None:
    names = [f"q{number}" for number in range(200)]
    world.enqueue(*(world.request(name) for name in names))
    engines = [world.engine() for _ in range(4)]

    def work(engine: Engine) -> None:
        while world.take(engine, 3):
            pass

    threads = [threading.Thread(target=work, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for engine in engines for name in engine.running) == sorted(names)
    world.check_integrity()


def sharers(world: World, count: int) -> list[Engine]:
    """Engines that have just asked, and found nothing."""
    engines = [world.engine() for _ in range(count)]
    for engine in engines:
        assert world.take(engine, 100) == []
    return engines


def enqueue(world: World, count: int) -> None:
    world.enqueue(*(world.request() for _ in range(count)))


def test_each_engine_takes_its_share_and_no_more(world: World) -> None:
    first, second, third = sharers(world, 3)
    enqueue(world, 16)
    assert world.take(first, 100) == [f"r{number}" for number in range(1, 7)]  # 16 / 3, rounded up
    assert world.take(first, 100) == []
    assert len(world.take(second, 4, places=100)) == 4
    assert len(world.take(third, 100)) == 5
    assert len(world.take(second, 4, places=96)) == 1 and world.queued() == []
    world.check_integrity()


def test_single_requests_go_to_the_engine_with_fewer(world: World) -> None:
    first, second = sharers(world, 2)
    enqueue(world, 1)
    assert world.take(second, 100) == ["r1"], "whoever comes first"
    enqueue(world, 1)
    assert world.take(second, 100) == []
    assert world.take(first, 100) == ["r2"]
    world.end(first, "r2")
    enqueue(world, 2)
    assert world.take(second, 100) == ["r3"]
    assert world.take(first, 100) == ["r4"]


def test_an_engine_with_more_gets_none_until_the_others_have_as_many(world: World) -> None:
    (first,) = sharers(world, 1)
    enqueue(world, 6)
    assert len(world.take(first, 100)) == 6, "alone it may have all"
    (second,) = sharers(world, 1)
    enqueue(world, 8)
    assert len(world.take(first, 100)) == 1
    assert len(world.take(second, 100)) == 7


def test_the_share_of_a_dead_engine_is_the_others_at_once(world: World) -> None:
    first, second = sharers(world, 2)
    enqueue(world, 10)
    assert len(world.take(second, 100)) == 5
    world.crash(second)
    enqueue(world, 3)
    assert len(world.take(first, 100)) == 8, "what the silent one had in flight counts for nothing either"
    heir = world.replace(second)
    assert len(world.take(first, 100)) == 5, "orphans are no matter of shares"
    enqueue(world, 1)
    assert len(world.take(first, 100)) == 1, "who has not asked yet has no share"
    assert heir.slot == second.slot


def test_the_share_of_an_engine_that_stopped_asking_lapses(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps, hangs, or has been full for so long."""
    first, second = sharers(world, 2)
    enqueue(world, 10)
    assert len(world.take(first, 100)) == 5
    assert world.take(first, 100) == []
    monkeypatch.setattr(transitions, "SHARE_TTL", 0.05)
    rest = wait_for(lambda: world.take(first, 100), "the rest")
    assert len(rest) == 5
    assert world.take(second, 100) == []


def test_a_full_engine_leaves_the_rest_to_others(world: World) -> None:
    small, large = sharers(world, 2)
    world.take(small, 4)
    enqueue(world, 20)
    assert len(world.take(large, 100)) == 16
    assert world.take(small, 8, places=4) == ["r17", "r18", "r19", "r20"]
    enqueue(world, 1)
    assert world.take(small, 4, places=0) == [], "the large one has room, though it has more"
    assert world.take(large, 1) == ["r21"]


def test_an_engine_without_places_holds_no_request_back(world: World) -> None:
    """It has seats, but its KV cache is full."""
    full, other = sharers(world, 2)
    assert world.take(full, 0) == []
    enqueue(world, 10)
    assert len(world.take(other, 100)) == 10


def test_ended_requests_free_no_places_until_their_engine_tells(world: World) -> None:
    full, other = sharers(world, 2)
    enqueue(world, 6)
    assert len(world.take(full, 3)) == len(world.take(other, 100)) == 3
    world.end(full, *full.running[:2])
    enqueue(world, 4)
    assert len(world.take(other, 100)) == 4, "the line in the full engine may need all that was freed"


def test_a_full_engine_takes_only_requests_beyond_all_places(world: World) -> None:
    full, other = sharers(world, 2)
    world.take(other, 3)
    enqueue(world, 5)
    assert world.take(full, 4, places=0) == ["r1", "r2"], "the other one has places for three"
    assert world.take(other, 4, places=3) == ["r3", "r4", "r5"]
    enqueue(world, 6)
    assert len(world.take(full, 4, places=0)) == 4, "where all are full, each keeps a line of its own"


@pytest.mark.parametrize(("seed", "most"), [*((seed, 5) for seed in range(5)), (5, 30), (6, 30)])
def test_any_load_is_shared_as_the_scripts_invariants_say(
    world: World, seed: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines with changing numbers of places ask in any order, for more or less than that, until no engine gets a request."""
    monkeypatch.setattr(transitions, "SHARE_TTL", 60.0)
    chance = random.Random(seed)
    engines = sharers(world, chance.randint(most // 2, most))
    for _ in range(12):
        places = {engine: chance.choice([0, 0, chance.randint(1, 40)]) for engine in engines}
        for engine in engines:
            assert world.take(engine, 0, places[engine]) == []
        enqueue(world, chance.randint(1, 8 * most))
        idle: set[Engine] = set()
        takers: set[Engine] = set()
        lines = 0  # taken by engines that had no places for them
        while idle != set(engines):
            engine = chance.choice(engines)
            most_now = chance.randint(1, 5) if places[engine] else chance.randint(0, 4)
            taken = len(world.take(engine, most_now, places[engine]))
            idle = set() if taken else {*idle, engine} if most_now else idle
            lines += max(0, taken - places[engine])
            places[engine] = max(0, places[engine] - taken)
            takers |= {engine} if taken else set()
        world.check_integrity()
        open_ones = [len(engine.running) for engine in engines if places[engine]]
        if open_ones:
            assert not world.queued() and not lines
            assert max((len(engine.running) for engine in takers), default=0) <= min(open_ones) + 1
        for engine in engines:
            world.end(engine, *chance.sample(engine.running, chance.randint(0, len(engine.running))))


def test_a_zombie_takes_nothing(world: World) -> None:
    world.enqueue(world.request("a"))
    zombie = world.engine()
    replacement = world.replace(zombie)
    assert replacement.slot == zombie.slot
    with pytest.raises(Fenced):
        world.take(zombie)
    assert world.take(replacement) == ["a"]
    world.check_integrity()


def test_after_a_wipe_an_engine_takes_when_it_has_its_slot_again(world: World) -> None:
    engine = world.engine()
    world.raw.flushall()
    world.enqueue(world.request("a"))
    call = world.take_call(engine)
    with pytest.raises(Unowned):
        world.bus.run(call)
    world.bus.run(leases.reclaim_slot(world.model, engine.slot, engine.incarnation))
    assert len(world.bus.run(call)) == 1
    world.check_integrity()


def test_a_trimmed_entry_ends_its_request_instead_of_losing_it(world: World) -> None:
    outcome = world.enqueue(world.request("a"), world.request("b"))
    assert isinstance(outcome, Enqueued)
    world.raw.xdel(keys.requests(world.model), outcome.entries[0])
    assert world.take(world.engine(), 2) == ["b"]
    assert (world.record("a").state, world.record("a").reason) == ("ended", "error")
    world.check_integrity()


def test_an_unreadable_entry_is_rejected_once(world: World) -> None:
    request = world.request("a")
    world.enqueue(request)
    engine = world.engine()
    (taken,) = world.bus.run(world.take_call(engine, 1))
    call = transitions.reject(world.model, engine.slot, engine.incarnation, taken.entry, "cannot be read")
    with Listener(world) as listener:
        assert world.bus.run(call) is True
        assert world.bus.run(call) is False
        (message,) = listener.wait_for(1)
    assert isinstance(message, RequestEnded)
    assert (message.request_id, message.handle, str(message.reason), message.error) == (
        "a",
        request.handle,
        "error",
        "cannot be read",
    )
    assert world.record("a").error == "cannot be read"
    world.check_integrity()


def test_a_zombie_rejects_nothing(world: World) -> None:
    world.enqueue(world.request("a"))
    zombie = world.engine()
    (taken,) = world.bus.run(world.take_call(zombie, 1))
    heir = world.replace(zombie)
    with pytest.raises(Fenced):
        world.bus.run(transitions.reject(world.model, zombie.slot, zombie.incarnation, taken.entry, "x"))
    assert world.bus.run(transitions.reject(world.model, heir.slot, heir.incarnation, taken.entry, "x")) is False
    world.check_integrity()


# Orphans


def orphans(world: World, *names: str, deaths: int = 1) -> None:
    """Requests that so many engines died of, one after the other."""
    engine = world.engine()
    world.enqueue(*(world.request(name) for name in names))
    for _ in range(deaths):
        world.take(engine, len(names))
        engine = world.replace(engine)
    world.take_over(engine, sure=True)


def test_an_orphan_comes_with_all_that_redis_knows_of_it(world: World) -> None:
    request = world.request("a")
    engine = world.running(request)
    begun = {"scheduled": "5.5", "first_token": "6.5", "cached_tokens": "2"}
    world.bus.run(world.flush_call(engine, started=[("a", begun)]))
    world.finish("a", choice=1, keep=3, reason=FinishReason.STOP, stop_reason="x")
    heir = world.replace(engine)
    (taken,) = world.bus.run(world.take_call(heir))
    orphan = taken.orphan
    assert orphan is not None
    assert (taken.client, taken.handle) == (request.client, request.handle)
    assert orphan.attachments == {(request.client, request.handle)}
    assert orphan.journals == tuple(f"{each.slot}:{each.incarnation}" for each in (engine, heir))
    assert orphan.orders == (Abort("a", choice=1, keep=3, reason=FinishReason.STOP, stop_reason="x"),)
    assert (orphan.attempts, orphan.cached_tokens) == (1, 2)
    assert (orphan.times.enqueued, orphan.times.scheduled, orphan.times.first_token) == (taken.enqueued, 5.5, 6.5)


def test_a_request_that_no_engine_ran_is_no_orphan(world: World) -> None:
    world.enqueue(world.request("a"))
    (taken,) = world.bus.run(world.take_call(world.engine()))
    assert taken.orphan is None


def test_orphans_of_another_fingerprint_wait_for_their_own_engines(world: World) -> None:
    orphans(world, "a")
    world.enqueue(world.request("new"))
    other, own = world.engine(), world.engine()
    other.fingerprint = "other weights"
    assert world.take(other, 5) == ["new"]
    assert world.take(own, 5) == ["a"]
    world.check_integrity()


def test_orphans_are_no_matter_of_shares(world: World) -> None:
    orphans(world, *(f"q{number}" for number in range(4)))
    first = world.engine()
    world.take(world.engine(), 0, places=100)
    assert len(world.take(first, 4)) == 4
    world.check_integrity()


def test_suspects_run_one_at_a_time(world: World) -> None:
    """Two engines in a row died of each; one of them may be why."""
    orphans(world, "a", "b", deaths=2)
    world.enqueue(world.request("innocent"))
    engine = world.engine()
    assert world.take(engine, 1, may_suspect=False) == ["innocent"]
    engine = world.replace(engine)
    assert world.take(engine, 1, may_suspect=False) == ["innocent"], "suspects before it do not hide it"
    assert world.take(engine, 5) == ["a"]
    assert world.take(engine, 5, may_suspect=False) == []
    world.end(engine, "a")
    assert world.take(engine, 5, may_suspect=True) == ["b"]
    world.check_integrity()


def test_a_call_that_was_numbered_before_gives_what_it_gave(world: World) -> None:
    enqueue(world, 6)
    engine = world.engine()
    first, second = world.take_call(engine, 2), world.take_call(engine, 2)
    given = world.bus.run(first)
    assert world.bus.run(first) == given
    later = world.bus.run(second)
    assert world.bus.run(first) == [], "it was overtaken"
    assert world.bus.run(second) == later
    assert [decode_request(each.payload).request_id for each in given + later] == ["r1", "r2", "r3", "r4"]
    world.end(engine, "r3")
    assert world.bus.run(second) == later[1:], "what has ended is not given again"
    world.check_integrity()


def test_an_engine_leaves_requests_of_newer_versions_and_takes_those_behind_them(world: World) -> None:
    newer = [f"newer{number}" for number in range(40)]
    world.enqueue(*(world.request(name) for name in newer))
    world.enqueue(world.request("older", version=1))
    behind, current = world.engine(), world.engine()
    assert world.take(behind, 4, version=1) == ["older"]
    assert world.take(behind, 4, places=40, version=1) == [], "and it says that it has places"
    assert world.queued() == newer
    assert world.take(current, 40) == newer, "none is left for an engine that cannot read it"
    world.check_integrity()


def test_an_orphan_of_a_newer_version_waits_for_an_engine_that_reads_it(world: World) -> None:
    engine = world.running("a")
    behind = world.replace(engine)
    assert world.take(behind, version=1) == []
    assert world.take(world.engine()) == ["a"]
    world.check_integrity()


def test_a_record_without_a_version_is_of_the_first(world: World) -> None:
    world.enqueue(world.request("a", version=1))
    world.raw.hdel(keys.record(world.model, "a"), "version")
    assert world.take(world.engine(), version=1) == ["a"]
