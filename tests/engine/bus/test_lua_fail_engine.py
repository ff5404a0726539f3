"""fail_engine.lua: each request that a dead engine had taken ends with one error, and no other request ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from engine.bus import keys, leases, transitions
from engine.bus.call import Fenced
from engine.bus.connection import Bus
from engine.bus.enqueue import Enqueued
from engine.bus.queue_depth import queue_depth
from engine.protocol import FinishReason, RequestEnded
from tests.engine.bus.ledger_world import Listener, World
from tests.engine.bus.lossy_proxy import LossyProxy


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def test_everything_in_flight_ends_with_the_error(world: World) -> None:
    requests = [world.request("a", tokens=9), world.request("b"), world.request("c")]
    world.enqueue(*requests)
    engine = world.engine()
    world.take(engine, 2)
    world.bus.run(world.flush_call(engine, started=[("a", {"scheduled": "1.5", "first_token": "1.6"})]))
    world.crash(engine)
    with Listener(world) as listener:
        assert world.fail_engine(engine) == 2
        ended = {(message.request_id, message.handle, message.reason, message.error) for message in listener.wait_for(2)}  # type: ignore[union-attr]
    assert ended == {(request.request_id, request.handle, FinishReason.ERROR, "it died") for request in requests[:2]}
    assert [world.record(name).state for name in "abc"] == ["ended", "ended", "queued"]
    assert (world.record("a").reason, world.record("a").error) == ("error", "it died")
    assert {line["prompt_tokens"] for line in world.usage_lines()} == {"9", "0"}, "only what was answered costs"
    assert world.fail_engine(engine) == 0
    world.check_integrity()


def test_the_requests_of_the_living_do_not_end(world: World) -> None:
    world.enqueue(world.request("a"))
    engine = world.engine()
    world.take(engine)
    assert world.fail_engine(engine) == 0
    assert world.record("a").state == "running"
    world.check_integrity()


def test_a_replacement_keeps_its_own(world: World) -> None:
    world.enqueue(world.request("a"), world.request("b"))
    first = world.engine()
    world.take(first)
    world.crash(first)
    second = world.engine()
    world.take(second)
    assert world.bus.run(transitions.fail_engine(world.model, second.slot, second.incarnation - 1, "it died")) == 1
    assert [world.record(name).state for name in "ab"] == ["ended", "running"]
    world.end(second, "b")
    world.check_integrity()


def test_an_earlier_dead_engine_does_not_end_its_successors_requests(world: World) -> None:
    world.enqueue(world.request("a"))
    first = world.engine()
    world.crash(first)
    second = world.engine()
    world.take(second)
    world.crash(second)
    assert world.fail_engine(first) == 0
    assert world.record("a").state == "running"
    assert world.fail_engine(second) == 1


def test_more_requests_than_a_batch_all_end(world: World) -> None:
    engine = world.engine()
    for _ in range(3):
        world.enqueue(*(world.request() for _ in range(128)))
    world.take(engine, 384)
    world.crash(engine)
    assert world.fail_engine(engine) == 384
    world.check_integrity()


def test_a_batch_of_the_replacements_requests_is_skipped(world: World) -> None:
    world.enqueue(*(world.request() for _ in range(300)))
    first = world.engine()
    world.take(first, 100)
    world.crash(first)
    second = world.engine()
    world.take(second, 200)
    # the first one's last request comes behind the second's in the pending list
    world.enqueue(world.request("last"))
    world.raw.hset(keys.record(world.model, "r300"), "incarnation", first.incarnation)
    assert world.fail_engine(first) == 101
    world.check_integrity()


def test_many_observers_at_once_end_each_request_once(world: World) -> None:
    world.enqueue(*(world.request() for _ in range(100)))
    engine = world.engine()
    world.take(engine, 100)
    world.crash(engine)
    failed: list[int] = []
    with Listener(world) as listener:
        threads = [threading.Thread(target=lambda: failed.append(world.fail_engine(engine))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        told = [message.request_id for message in listener.wait_for(100) if isinstance(message, RequestEnded)]
    assert sum(failed) == 100
    assert len(told) == len(set(told)) == 100
    world.check_integrity()


def test_a_lost_answer_ends_nothing_twice(world: World) -> None:
    world.enqueue(world.request("a"))
    engine = world.engine()
    world.take(engine)
    world.crash(engine)
    with LossyProxy(world.url) as proxy, Bus(proxy.url) as bus:
        bus.run(queue_depth(world.model))
        proxy.losses = 1
        assert bus.run(transitions.fail_engine(world.model, engine.slot, engine.incarnation, "it died")) == 0
        assert proxy.lost == 1
    assert world.record("a").error == "it died"
    world.check_integrity()


def test_entries_that_were_trimmed_away_end_their_requests_too(world: World) -> None:
    outcome = world.enqueue(world.request("a"), world.request("b"))
    assert isinstance(outcome, Enqueued)
    engine = world.engine()
    world.take(engine, 2)
    world.crash(engine)
    world.raw.xdel(keys.requests(world.model), outcome.entries[0])
    assert world.fail_engine(engine) == 2
    assert world.record("a").state == "ended"
    world.check_integrity()


def test_entries_of_which_nothing_is_known_are_cleared_away(world: World) -> None:
    world.enqueue(world.request("a"))
    engine = world.engine()
    world.take(engine)
    world.raw.delete(keys.record(world.model, "a"))
    world.crash(engine)
    assert world.fail_engine(engine) == 0
    assert (world.entries(), world.pending()) == ({}, {})


def test_an_observer_of_the_exit_releases_the_slot_and_ends_its_requests_at_once(world: World) -> None:
    world.enqueue(world.request("a"))
    engine = world.engine()
    world.take(engine)
    assert world.bus.run(leases.release_slot(world.model, engine.slot, engine.incarnation)) is True
    assert world.fail_engine(engine) == 1
    assert world.bus.run(leases.engines(world.model)) == []
    with pytest.raises(Fenced):
        world.take(engine)
    heir = world.engine()
    assert heir.slot == engine.slot
    assert world.bus.run(leases.release_slot(world.model, engine.slot, engine.incarnation)) is False
    assert world.fail_engine(engine) == 0
    assert len(world.bus.run(leases.engines(world.model))) == 1, "its heir lives"
    world.check_integrity()


def test_an_unknown_model_has_no_requests_to_end(world: World) -> None:
    assert world.bus.run(transitions.fail_engine("nobody", "0", 1, "it died")) == 0
