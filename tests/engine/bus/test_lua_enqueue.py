"""enqueue.lua: a list of requests is enqueued whole or not at all, also when senders repeat it or race."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from engine.bus import keys, records
from engine.bus.connection import Bus
from engine.bus.enqueue import AdmissionLimits, Enqueued, Refused, accepts, enqueue
from engine.bus.queue_depth import queue_depth
from engine.protocol import decode_request
from tests.engine.bus.ledger_world import CLIENT, World
from tests.engine.bus.lossy_proxy import LossyProxy


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def refusal(outcome: Enqueued | Refused) -> Refused:
    assert isinstance(outcome, Refused)
    return outcome


def test_a_request_becomes_entry_record_and_place(world: World) -> None:
    request = world.request("a", tokens=5, n=2, priority=-3, tenant="t")
    outcome = world.enqueue(request, external_id="chatcmpl-1")
    assert isinstance(outcome, Enqueued)
    record = world.record("a")
    assert (record.state, record.entry, record.client, record.handle) == ("queued", outcome.entries[0], CLIENT, request.handle)
    assert (record.prompt_tokens, record.n, record.priority, record.tenant, record.stream) == (5, 2, -3, "t", True)
    assert (record.external_id, record.endpoint, record.max_tokens) == ("chatcmpl-1", "/v1/completions", 16)
    assert record.enqueued > 0
    payload = world.raw.xrange(keys.requests(world.model))[0][1][b"payload"]
    assert replace(decode_request(payload), facts=request.facts) == request
    world.check_integrity()


def test_lower_priority_numbers_first_then_arrival(world: World) -> None:
    for name, priority in (("a", 5), ("b", 0), ("c", -1_000_000), ("d", 0), ("e", 5)):
        world.enqueue(world.request(name, priority=priority))
    world.enqueue(*(world.request(f"list{number:02}") for number in range(25)))
    assert world.queued() == ["c", "b", "d", *(f"list{number:02}" for number in range(25)), "a", "e"]


def test_a_request_sent_twice_is_enqueued_once(world: World) -> None:
    requests = [world.request(), world.request()]
    first = world.enqueue(*requests)
    assert world.enqueue(*requests) == first
    engine = world.engine()
    world.take(engine)
    assert world.enqueue(*requests) == first, "one of them runs by now"
    world.end(engine, requests[0].request_id)
    assert world.enqueue(*requests) == first, "one of them has ended by now"
    world.check_integrity()


def test_a_list_that_repeats_only_some_requests_is_refused(world: World) -> None:
    known = world.request()
    world.enqueue(known)
    assert refusal(world.enqueue(known, world.request())).reason == "duplicate"
    assert world.queued() == [known.request_id]
    world.check_integrity()


def test_a_lost_answer_is_made_up_for(world: World) -> None:
    with LossyProxy(world.url) as proxy, Bus(proxy.url) as bus:
        bus.run(queue_depth(world.model))
        proxy.losses = 1
        request = world.request()
        limits = AdmissionLimits(max_num_queued_reqs=1, require_engine=False)
        outcome = bus.run(enqueue(world.model, [request], limits))
        assert proxy.lost == 1
    assert isinstance(outcome, Enqueued)
    assert list(world.entries()) == outcome.entries
    world.check_integrity()


def test_the_id_of_another_clients_request_is_refused(world: World) -> None:
    world.enqueue(world.request("a"))
    refused = refusal(world.enqueue(world.request("b"), world.request("a", client="api-2")))
    assert (refused.reason, refused.request_id) == ("duplicate", "a")
    assert world.queued() == ["a"]
    world.check_integrity()


def test_an_abort_that_came_first_refuses_the_whole_list(world: World) -> None:
    request = world.request("late")
    assert world.finish("late").state == "unknown"
    refused = refusal(world.enqueue(world.request(), request))
    assert (refused.reason, refused.request_id) == ("aborted", "late")
    assert world.entries() == {}
    assert world.raw.pttl(keys.tombstone(world.model, "late")) > 500_000
    world.check_integrity()


def test_the_limit_of_requests_counts_choices_waiting_and_running(world: World) -> None:
    limits = AdmissionLimits(max_num_queued_reqs=4, require_engine=False)
    assert isinstance(world.enqueue(world.request("a", n=3), limits=limits), Enqueued)
    refused = refusal(world.enqueue(world.request(n=2), limits=limits))
    assert (refused.reason, refused.value, refused.limit) == ("max_num_queued_reqs", 5, 4)
    engine = world.engine()
    world.take(engine)
    assert refusal(world.enqueue(world.request(), world.request(), limits=limits)).value == 5
    world.end(engine, "a")
    assert isinstance(world.enqueue(world.request(n=4), limits=limits), Enqueued)
    world.check_integrity()


def test_the_limit_of_tokens_counts_waiting_prompts_only(world: World) -> None:
    limits = AdmissionLimits(max_num_queued_tokens=10, require_engine=False)
    assert isinstance(world.enqueue(world.request(tokens=100), limits=limits), Enqueued), "nothing waited: a long prompt passes"
    refused = refusal(world.enqueue(world.request(), limits=limits))
    assert (refused.reason, refused.value, refused.limit) == ("max_num_queued_tokens", 100, 10)
    world.take(world.engine())
    assert isinstance(world.enqueue(world.request(), limits=limits), Enqueued)
    world.check_integrity()


def test_requests_wait_while_an_engine_lives_or_did_lately(world: World) -> None:
    limits = AdmissionLimits(require_engine=True)
    assert refusal(world.enqueue(world.request(), limits=limits)).reason == "no_engine"
    engine = world.engine()
    assert isinstance(world.enqueue(world.request(), limits=limits), Enqueued)
    world.crash(engine)
    world.take_over(engine)
    assert isinstance(world.enqueue(world.request(), limits=limits), Enqueued), "the next engine may come within the failover time"
    world.raw.delete(keys.served(world.model))
    assert refusal(world.enqueue(world.request(), limits=limits)).reason == "no_engine"
    world.check_integrity()


def test_memory_is_refused_before_redis_is_full(world: World) -> None:
    used = world.raw.info("memory")["used_memory"]
    world.raw.config_set("maxmemory", int(used / 0.85))
    try:
        refused = refusal(world.enqueue(world.request()))
        assert refused.reason == "memory"
        assert refused.value > refused.limit > 0
        told = world.bus.run(accepts())
        assert told is not None and (told.reason, told.limit) == ("memory", refused.limit)
    finally:
        world.raw.config_set("maxmemory", 0)
    assert isinstance(world.enqueue(world.request()), Enqueued)
    world.check_integrity()


def test_racing_senders_stay_within_the_limit(world: World) -> None:
    limits = AdmissionLimits(max_num_queued_reqs=20, require_engine=False)
    requests = [world.request(n=2) for _ in range(32)]
    outcomes: list[Enqueued | Refused] = []
    threads = [
        threading.Thread(
            target=lambda mine: outcomes.extend(world.enqueue(each, limits=limits) for each in mine), args=(requests[i::4],)
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(outcome, Enqueued) for outcome in outcomes) == 10
    assert len(outcomes) == 32
    world.check_integrity()


def test_the_index_of_a_reused_id_is_bounded(world: World) -> None:
    engine = world.running("patient")
    for number in range(140):
        world.enqueue(world.request(f"r{number}"))
        world.take(engine)
        world.end(engine, f"r{number}")
    assert world.raw.zcard(keys.external(world.model, "ext")) == 129  # 128, and the one that still runs
    found = [view.id for view in world.bus.run(records.find(world.model, "ext"))]
    assert found[:3] == ["r139", "r138", "r137"]
    assert found[-1] == "patient"


def test_a_handle_too_large_for_lua_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="53 bits"):
        world.enqueue(world.request(handle=2**53))
