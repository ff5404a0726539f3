"""Limits of the queue between tenants, in the script and as the API server foretells them; estimates of waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from engine.bus.enqueue import AdmissionLimits, Enqueued, Refused
from engine.bus.queue_depth import queue_depth
from engine.client.admission import estimated_wait, foresee, limits_by_pace, retry_after, service_rate
from engine.protocol import EngineInfo, EngineStats
from engine.runtime.service_rate import ServiceRate
from tests.engine.bus.ledger_world import World, engine_info


@pytest.fixture
def world(redis_url: str) -> Iterator[World]:
    with World(redis_url) as world:
        yield world


def send(world: World, tenant: str, limits: AdmissionLimits, weight: float = 1.0) -> Enqueued | Refused:
    request = world.request(tenant=tenant)
    return world.enqueue(replace(request, facts=replace(request.facts, weight=weight)), limits=limits)


def fill(world: World, tenant: str, limits: AdmissionLimits, weight: float = 1.0) -> tuple[int, Refused]:
    """How many requests of a tenant are taken until one is refused. The refusal is foretold from the queue's numbers."""
    for count in range(1000):
        foretold = foresee(world.bus.run(queue_depth(world.model)), limits, tenant, weight)
        outcome = send(world, tenant, limits, weight)
        if isinstance(outcome, Refused):
            assert foretold == outcome
            return count, outcome
        assert foretold is None
    raise AssertionError("no limit")


LIMITS = {
    "max_num_queued_reqs": AdmissionLimits(max_num_queued_reqs=20, require_engine=False),
    "max_num_queued_tokens": AdmissionLimits(max_num_queued_tokens=60, require_engine=False),
    "max_queue_seconds": AdmissionLimits(max_num_waiting=20, require_engine=False),
}


@pytest.mark.parametrize("reason", LIMITS)
def test_a_flood_leaves_others_their_share(world: World, reason: str) -> None:
    limits = LIMITS[reason]
    count, refusal = fill(world, "flood", limits)
    assert (count, refusal.reason, refusal.of_tenant) == (20, reason, False), "alone it may have all, and then the house is full"
    count, refusal = fill(world, "other", limits)
    assert (count, refusal.of_tenant) == (10, True)
    count, refusal = fill(world, "third", limits)
    assert (count, refusal.of_tenant) == (6 if reason == "max_num_queued_reqs" else 7, True)
    assert isinstance(send(world, "flood", limits), Refused)
    world.check_integrity()


def test_a_weight_is_a_share_of_the_queue_too(world: World) -> None:
    limits = LIMITS["max_queue_seconds"]
    fill(world, "flood", limits)
    assert fill(world, "other", limits, weight=3.0)[0] == 15
    assert isinstance(send(world, "flood", limits), Refused)


def test_a_list_may_come_to_a_queue_that_is_not_full(world: World) -> None:
    limits = LIMITS["max_queue_seconds"]
    assert isinstance(world.enqueue(*(world.request() for _ in range(30)), limits=limits), Enqueued)
    assert isinstance(world.enqueue(world.request(), limits=limits), Refused)


def engine(rate: float, running: int = 8, waiting: int = 0) -> EngineInfo:
    info = engine_info()
    info.max_num_seqs, info.stats = 8, EngineStats(num_running=running, num_waiting=waiting, choices_per_second=rate)
    return info


def test_the_answer_says_how_many_wait_before(world: World) -> None:
    for expected in range(3):
        outcome = world.enqueue(world.request())
        assert isinstance(outcome, Enqueued) and outcome.num_before == expected


def test_the_engines_pace_is_what_they_measured() -> None:
    assert service_rate([]) == service_rate([engine(0.0)]) == 0.0
    assert service_rate([engine(2.0), engine(0.0)]) == 4.0, "one that has not measured it counts as the other"
    assert estimated_wait(9, [engine(2.0)]) == 5.0
    assert estimated_wait(2, [engine(0.0, running=5)]) == 0.0, "there are three free seats"
    assert estimated_wait(9, [engine(0.0)]) is None


def test_what_may_wait_follows_the_pace() -> None:
    limits = AdmissionLimits()
    assert limits_by_pace(limits, [engine(0.5)], 180).max_num_waiting == 90
    assert limits_by_pace(limits, [engine(0.01)], 180).max_num_waiting == 8, "as many as run"
    assert limits_by_pace(limits, [engine(0.0)], 180).max_num_waiting == 64, "the pace is not known yet"
    assert limits_by_pace(limits, [engine(0.5)], 0).max_num_waiting is None
    assert limits_by_pace(limits, [], 180).max_num_waiting is None, "no engine lives: the next one is waited for"


def test_a_refusal_says_when_to_come_again() -> None:
    assert retry_after(Refused("max_queue_seconds", 29, 20), [engine(2.0)]) == 5
    assert retry_after(Refused("max_queue_seconds", 2000, 20), [engine(2.0)]) == 60
    assert retry_after(Refused("max_queue_seconds", 29, 20), [engine(0.0)]) == 1


def test_a_pace_is_measured_while_the_engine_is_full() -> None:
    rate = ServiceRate()
    assert rate.look(0.0, 0, True) == rate.look(0.5, 5, True) == 0.0, "too short"
    assert rate.look(1.5, 15, True) == pytest.approx(10)
    assert rate.look(60.0, 15, False) == pytest.approx(10), "idle times do not count"
    assert rate.look(61.0, 16, True) == pytest.approx(10)
    told = [rate.look(61.0 + second, 16 + 2 * second, True) for second in range(1, 100)]
    assert told[0] > told[-1] == pytest.approx(2, rel=0.05)
