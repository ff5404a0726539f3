"""stage.lua and commit.lua: a long list of prompts is enqueued in slices that keep Redis free, and still whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.bus import enqueue as enqueue_calls
from engine.bus import keys
from engine.bus.call import Call
from engine.bus.connection import Bus
from engine.bus.enqueue import SLICE, AdmissionLimits, Enqueued, Refused, enqueue
from engine.bus.queue_depth import queue_depth
from engine.protocol import EngineCoreRequest, RequestFacts
from tests.engine.bus.ledger_world import World
from tests.engine.bus.lossy_proxy import LossyProxy
from tests.waiting import wait_for

LIMITS = AdmissionLimits(require_engine=False)


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def long_list(world: World, count: int = 100, prefix: str = "p") -> list[EngineCoreRequest]:
    facts = RequestFacts("ext", 600.0, "/v1/completions", stream=True)
    return [world.request(f"{prefix}{number:04}", n=2, tenant="t", facts=facts) for number in range(count)]


def stage_only(world: World, requests: list[EngineCoreRequest]) -> None:
    """The API server dies before the commit."""
    call: Call[object] = enqueue(world.model, requests, LIMITS)
    while call.script is not None and call.script.name == "stage":
        answer = world.raw.execute_command(*call.eval())
        following = call.decode(answer)
        assert isinstance(following, Call)
        call = following


def test_a_long_list_is_enqueued_in_its_order(world: World) -> None:
    world.enqueue(world.request("before"))
    outcome = world.enqueue(*long_list(world))
    world.enqueue(world.request("behind", tenant="t"))
    assert isinstance(outcome, Enqueued) and outcome.num_before == 1 and len(outcome.entries) == 100
    assert world.queued() == ["before", *(f"p{number:04}" for number in range(100)), "behind"]
    engine = world.engine()
    assert len(world.take(engine, 500)) == 102
    world.end(engine, *list(engine.running))
    world.check_integrity()


def test_a_long_list_comes_in_many_scripts(world: World) -> None:
    world.raw.config_resetstat()
    world.enqueue(*long_list(world, 1024))
    stats = world.raw.info("commandstats")
    assert sum(stats[name]["calls"] for name in stats if name in ("cmdstat_evalsha", "cmdstat_eval")) > 1024 / SLICE


def test_nobody_sees_a_list_before_it_is_whole(world: World) -> None:
    requests = long_list(world)
    stage_only(world, requests)
    depth = world.bus.run(queue_depth(world.model))
    assert (depth.waiting, depth.live, depth.live_choices) == (0, 0, 0)
    assert world.take(world.engine(), 100) == []
    assert isinstance(world.enqueue(*requests), Enqueued), "sent again, it is enqueued"
    assert len(world.queued()) == 100
    assert world.raw.exists(keys.staged(world.model)) == 0
    world.check_integrity()


def test_what_was_not_committed_goes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueue_calls, "STAGED_TTL", 0.02)
    stage_only(world, long_list(world, 40))
    monkeypatch.setattr(enqueue_calls, "STAGED_TTL", 60.0)
    world.raw.zadd(keys.staged(world.model), {entry: 1.0 for entry in world.entries()})
    wait_for(lambda: not world.records(), "the end of the records")
    assert isinstance(world.enqueue(*(world.request() for _ in range(40))), Enqueued)
    assert len(world.entries()) == 40
    world.check_integrity()


def test_a_refused_list_leaves_nothing_in_the_queue(world: World) -> None:
    limits = AdmissionLimits(max_num_queued_reqs=150, require_engine=False)
    refused = world.enqueue(*long_list(world), limits=limits)
    assert isinstance(refused, Refused) and (refused.reason, refused.value) == ("max_num_queued_reqs", 200)
    assert world.queued() == [] and world.raw.exists(keys.load(world.model)) == 0


def test_an_abort_that_comes_before_the_commit_refuses_the_list(world: World) -> None:
    requests = long_list(world)
    stage_only(world, requests)
    assert world.finish("p0070").state == "unknown"
    refused = world.enqueue(*requests)
    assert isinstance(refused, Refused) and (refused.reason, refused.request_id) == ("aborted", "p0070")
    assert world.queued() == []


def test_lost_answers_are_made_up_for(world: World) -> None:
    requests = long_list(world)
    first = world.enqueue(*requests)
    assert world.enqueue(*requests).entries == first.entries  # type: ignore[union-attr]
    with LossyProxy(world.url) as proxy, Bus(proxy.url) as bus:
        bus.run(queue_depth(world.model))
        proxy.losses = 3
        assert isinstance(bus.run(enqueue(world.model, long_list(world, 70, "q"), LIMITS)), Enqueued)
    assert len(world.queued()) == 170
    world.check_integrity()


def test_the_ids_of_another_list_refuse_it(world: World) -> None:
    world.enqueue(world.request("p0050"))
    refused = world.enqueue(*long_list(world))
    assert isinstance(refused, Refused) and (refused.reason, refused.request_id) == ("duplicate", "p0050")
    assert world.queued() == ["p0050"]
