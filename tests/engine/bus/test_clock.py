"""All times are by Redis' clock, whatever the clocks of other machines show."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import pairwise

import pytest

from engine.bus import leases, records, usage
from engine.bus.clock import SAMPLES, BusClock, redis_time
from engine.client.client import AsyncClient
from ops.tables import duration
from tests.engine.bus.ledger_world import World
from tests.engine.conftest import MODEL, RunningEngine
from tests.engine.runtime.null_requests import add, make_request

HOUR = 3600.0
MARKS = ("enqueued", "received", "scheduled", "first_token", "last_token", "finished")


@pytest.fixture
def world(redis_url: str) -> Iterator[World]:
    with World(redis_url, MODEL) as world:
        yield world


@pytest.fixture
def true_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """The right time, where all clocks of this process but Redis' are an hour ahead."""
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + HOUR)
    return right


def test_the_closest_of_many_answers_counts() -> None:
    clock = BusClock()
    clock.heard(told=1000.0, asked_at=10.0, heard_at=12.0)  # between -1 and +1 s of the truth
    assert clock() - time.monotonic() == pytest.approx(1000.0 - 11.0)
    clock.heard(told=1001.4, asked_at=12.0, heard_at=12.002)
    assert clock() - time.monotonic() == pytest.approx(1001.4 - 12.001)
    clock.heard(told=1009.0, asked_at=13.0, heard_at=20.0)  # a slow answer, a retry, says little
    assert clock() - time.monotonic() == pytest.approx(1001.4 - 12.001)


def test_the_clock_follows_when_redis_clock_was_set() -> None:
    clock = BusClock()
    clock.heard(told=1000.0, asked_at=10.0, heard_at=10.001)
    for _ in range(SAMPLES):
        clock.heard(told=5000.0, asked_at=11.0, heard_at=11.01)
    assert clock() - time.monotonic() == pytest.approx(5000.0 - 11.005)


def test_asking_redis_sets_the_clock(world: World, true_time: Callable[[], float]) -> None:
    clock = BusClock()
    assert clock() == pytest.approx(true_time() + HOUR, abs=1.0)
    clock.ask(world.bus)
    assert clock() == pytest.approx(world.bus.run(redis_time()), abs=0.1) == pytest.approx(true_time(), abs=1.0)


async def test_every_time_of_a_request_is_of_one_clock(
    start_engine: Callable[..., RunningEngine], client: AsyncClient, true_time: Callable[[], float]
) -> None:
    before = true_time()
    engine = start_engine()
    (follower,) = await add(client, request := make_request(client))
    _, (end,) = await follower.whole()
    (record,) = engine.bus.run(records.ended_requests(MODEL))
    after = true_time()
    assert record.id == request.request_id
    times = [getattr(record, mark) for mark in MARKS]
    assert all(before - 0.1 <= at <= after + 0.1 for at in times), times
    assert all(later - earlier > -0.001 for earlier, later in pairwise(times)), times
    assert (end.times.enqueued, end.times.received) == (record.enqueued, record.received)
    (info,) = engine.bus.run(leases.engines(MODEL))
    assert before - 0.1 <= info.started <= after + 0.1


def test_requests_are_ordered_by_arrival_whatever_their_servers_clocks_show(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = world.engine()
    world.enqueue(world.request("early"))
    monkeypatch.setattr(time, "time", lambda right=time.time: right() - HOUR)
    world.enqueue(world.request("late"))
    early, late = world.bus.run(world.take_call(engine, 2))
    assert early.enqueued <= late.enqueued <= early.taken == late.taken
    assert [view.id for view in world.bus.run(records.live_requests(world.model))] == ["late", "early"]


def test_usage_counts_on_the_day_of_redis_clock(world: World, true_time: Callable[[], float]) -> None:
    engine = world.engine()
    world.enqueue(world.request("r"))
    world.end(engine, *world.take(engine))
    today = datetime.fromtimestamp(true_time(), UTC).date()
    world.bus.run(usage.roll_usage(world.model))
    assert world.bus.run(usage.usage_days(world.model)) == [today]


def test_a_table_s_durations_are_not_negative() -> None:
    assert duration(-0.0004) == "0.0 ms"
