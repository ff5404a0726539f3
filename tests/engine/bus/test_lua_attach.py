"""attach.lua and detach.lua: which stream listens to a request. enqueue.lua: one request for all with the same Idempotency-Key."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from engine.bus import control, keys, transitions
from engine.bus.attachments import Attachment, attach, detach
from engine.bus.enqueue import AdmissionLimits, Enqueued, Refused, Repeated, enqueue
from engine.protocol import Abort, Attach, Detached, EngineCoreRequest, FinishReason, RequestFacts
from tests.engine.bus.ledger_world import CLIENT, Engine, Listener, World

OTHER = "api-other"


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def attached(world: World, *requests: tuple[str, int], client: str = OTHER) -> list[str]:
    return world.bus.run(attach(world.model, client, requests))


def commands(world: World, engine: Engine) -> list[Any]:
    return world.bus.run(control.read_control(world.model, engine.slot, engine.incarnation)).commands


def enqueue_with(world: World, request: EngineCoreRequest, **facts: Any) -> Enqueued | Refused | Repeated:
    call = enqueue(world.model, [replace(request, facts=RequestFacts(**facts))], AdmissionLimits(require_engine=False))
    return world.bus.run(call)


def test_a_waiting_request_is_attached_in_its_record_alone(world: World) -> None:
    request = world.request("a")
    world.enqueue(request)
    with Listener(world) as listener:
        assert attached(world, ("a", 77)) == ["queued"]
        assert listener.wait_for(1) == [Detached("a", request.handle)]
    record = world.record("a")
    assert (record.client, record.handle) == (OTHER, 77)
    assert world.raw.hget(keys.record(world.model, "a"), "attachments") == f"{CLIENT}:{request.handle} {OTHER}:77".encode()
    world.check_integrity()


def test_the_engine_of_a_running_request_is_told(world: World) -> None:
    engine = world.engine()
    world.enqueue(world.request("a"), world.request("b"))
    world.take(engine, 2)
    assert attached(world, ("a", 5), ("b", 6), ("nobody", 7)) == ["running", "running", "unknown"]
    assert commands(world, engine) == [Attach("a", OTHER, 5), Attach("b", OTHER, 6)]
    world.check_integrity()


def test_attaching_twice_is_attaching_once(world: World) -> None:
    world.enqueue(world.request("a"))
    attached(world, ("a", 5))
    with Listener(world, OTHER) as listener:
        attached(world, ("a", 5))
        attached(world, ("a", 6))
        assert listener.wait_for(1) == [Detached("a", 5)]
    assert world.raw.hget(keys.record(world.model, "a"), "attachments").count(b" ") == 2
    world.check_integrity()


def test_a_lost_answer_is_made_up_for_though_another_stream_listens(world: World) -> None:
    request = world.request("a")
    first = world.enqueue(request)
    attached(world, ("a", 5))
    assert isinstance(first, Enqueued) and world.enqueue(request) == first
    assert world.record("a").client == OTHER


def test_an_ended_request_stays_as_it_is(world: World) -> None:
    world.enqueue(world.request("a"))
    world.finish("a")
    assert attached(world, ("a", 5)) == ["ended"]
    assert world.record("a").client == CLIENT


def test_the_late_word_of_a_stream_that_listens_no_more_counts_for_nothing(world: World) -> None:
    request = world.request("a")
    world.enqueue(request)
    attached(world, ("a", 5))
    old, present = Attachment(CLIENT, request.handle), Attachment(OTHER, 5)
    finish = transitions.finish
    assert world.bus.run(finish(world.model, "a", Abort("a"), asker=old)).state == "detached"
    assert world.queued() == ["a"]
    assert world.bus.run(finish(world.model, "a", Abort("a"), asker=present)).state == "queued"
    assert world.record("a").state == "ended"
    world.check_integrity()


def test_a_grace_time_counts_from_the_first_loss_of_the_stream(world: World) -> None:
    request = world.request("a")
    enqueue_with(world, request, grace=60.0)
    left = world.bus.run(detach(world.model, "a", CLIENT, request.handle))
    assert left is not None and 59 < left <= 60
    again = world.bus.run(detach(world.model, "a", CLIENT))
    assert again is not None and again <= left
    attached(world, ("a", 5))
    assert world.bus.run(detach(world.model, "a", CLIENT)) is None, "another stream listens"
    fresh = world.bus.run(detach(world.model, "a", OTHER, 5))
    assert fresh is not None and fresh > 59


def test_a_request_without_a_grace_time_ends_with_its_stream(world: World) -> None:
    world.enqueue(world.request("a"))
    assert world.bus.run(detach(world.model, "a", CLIENT)) == 0.0
    world.finish("a")
    assert world.bus.run(detach(world.model, "a", CLIENT)) is None


def test_one_of_many_with_the_same_idempotency_key_is_enqueued(world: World) -> None:
    facts = {"idempotency_key": "k", "body_hash": "b1"}
    outcomes: list[Any] = []
    requests = [world.request(tenant="t") for _ in range(40)]
    threads = [
        threading.Thread(target=lambda mine=requests[i::4]: outcomes.extend(enqueue_with(world, each, **facts) for each in mine))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(each, Enqueued) for each in outcomes) == 1
    (winner,) = world.queued()
    assert {each.request_id for each in outcomes if isinstance(each, Repeated)} == {winner}
    assert isinstance(enqueue_with(world, world.request(tenant="other"), **facts), Enqueued), "another tenant's key"
    repeated = enqueue_with(world, world.request(tenant="t"), idempotency_key="k", body_hash="b2")
    assert repeated == Repeated(winner, "b1")


@pytest.mark.parametrize(("reason", "computed_again"), [(FinishReason.STOP, False), (FinishReason.ERROR, True)])
def test_a_stored_answer_serves_its_key_and_a_failure_does_not(world: World, reason: FinishReason, computed_again: bool) -> None:
    engine = world.engine()
    facts = {"idempotency_key": "k", "body_hash": "b", "retention": 60.0}
    enqueue_with(world, world.request("a"), **facts)
    key = keys.idempotency(world.model, "", "k")
    assert world.raw.pttl(key) == -1
    world.take(engine)
    world.end(engine, "a", reason=reason)
    assert 0 < world.raw.pttl(key) <= 60_000, "kept as long as the record"
    assert isinstance(enqueue_with(world, world.request("b"), **facts), Enqueued if computed_again else Repeated)
