"""absent.lua and roll_usage.lua, and the looks and sweeps of maintenance around them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from datetime import date

import pytest

from engine.bus import journals, keys, leases, maintenance, records, usage
from engine.bus.connection import Bus
from engine.bus.queue_depth import queue_depth
from engine.bus.usage import ROLL_BATCH, UsageTotals
from tests.engine.bus.ledger_world import CLIENT, World
from tests.engine.bus.lossy_proxy import LossyProxy
from tests.redis_server import RedisServer
from tests.waiting import wait_for


@pytest.fixture
def world(each_redis_url: str) -> Iterator[World]:
    with World(each_redis_url) as world:
        yield world


def look_until_dead(world: World, name: str) -> int:
    """How many looks in a row it takes; each is a round trip."""
    looks = 0

    def dead() -> bool:
        nonlocal looks
        looks += 1
        return world.bus.run(leases.api_absent(name, ttl=0.05))

    wait_for(dead, "its death", pause=0.001)
    return looks


def test_absent_at_two_looks_far_enough_apart(world: World) -> None:
    name = world.bus.run(leases.announce_api(ttl=60.0))
    assert world.bus.run(leases.api_absent(name, ttl=0.001)) is False
    world.raw.delete(keys.api(name))
    assert world.bus.run(leases.api_absent(name, ttl=60.0)) is False
    assert world.bus.run(leases.api_absent(name, ttl=60.0)) is False
    world.raw.delete(keys.absent_api(name))
    assert look_until_dead(world, name) > 2
    assert world.bus.run(leases.api_absent(name, ttl=0.05)) is True, "and it stays so"


def test_an_api_server_that_came_back_between_two_looks_is_alive(world: World) -> None:
    name = world.bus.run(leases.announce_api())
    world.raw.delete(keys.api(name))
    assert look_until_dead(world, name) > 1
    world.bus.run(leases.beat_api(name))
    assert world.bus.run(leases.api_absent(name, ttl=0.05)) is False
    world.bus.run(leases.release_api(name))
    assert world.bus.run(leases.api_absent(name, ttl=0.05)) is False


def test_a_first_look_of_long_ago_does_not_count(world: World) -> None:
    assert world.bus.run(leases.api_absent("1")) is False
    assert 0 < world.raw.pttl(keys.absent_api("1")) <= 15_000
    engine = world.engine()
    world.enqueue(world.request())
    world.take(engine)
    world.crash(engine)
    assert world.bus.run(leases.dead_engines(world.model)) == []
    assert 0 < world.raw.pttl(keys.absent_engine(world.model, engine.slot)) <= 15_000


def test_looks_do_not_count_across_a_restart_of_redis() -> None:
    server = RedisServer(None, "--appendonly", "yes", "--appendfsync", "always")
    try:
        with World(server.url) as world:
            assert world.bus.run(leases.api_absent("1", ttl=0.001)) is False
            server.kill()
            server.start()
            assert world.raw.exists(keys.absent_api("1")), "the marker outlived it"
            assert world.bus.run(leases.api_absent("1", ttl=0.001)) is False
            assert look_until_dead(world, "1") >= 1
    finally:
        server.stop()


def test_requests_are_found_by_their_api_server(world: World) -> None:
    for number in range(6):
        world.enqueue(*(world.request(client=f"api-{number % 3}") for _ in range(200)))
    assert world.bus.run(maintenance.clients(world.model)) == {"api-0": 400, "api-1": 400, "api-2": 400}
    found = world.bus.run(maintenance.requests_of(world.model, frozenset(["api-1", "api-2"])))
    assert len(found) == len(set(found)) == 800
    assert all(world.record(name).client == client for name, client in (found[0], found[-1]))
    assert len(world.bus.run(maintenance.requests_of(world.model, frozenset(["api-1"]), most=30))) == 30
    assert world.bus.run(maintenance.requests_of(world.model, frozenset(["nobody"]))) == []
    world.finish(found[0][0])
    assert sum(world.bus.run(maintenance.clients(world.model)).values()) == 1199


def test_records_that_ran_out_leave_the_index(world: World) -> None:
    world.enqueue(*(world.request() for _ in range(5)))
    for name in ("r1", "r2", "r3"):
        world.finish(name)
    world.raw.delete(keys.record(world.model, "r1"), keys.record(world.model, "r2"))
    assert world.bus.run(maintenance.forget_records(world.model)) == 2
    assert [view.id for view in world.bus.run(records.ended_requests(world.model))] == ["r3"]
    assert world.raw.zcard(keys.ended(world.model)) == 1
    assert world.bus.run(maintenance.forget_records(world.model)) == 0


def test_api_servers_long_gone_leave_the_index(world: World) -> None:
    alive, gone = world.bus.run(leases.announce_api(ttl=60.0)), world.bus.run(leases.announce_api())
    world.raw.delete(keys.api(gone))
    assert world.bus.run(maintenance.forget_api_servers(silence=60.0)) == 0
    assert world.bus.run(maintenance.forget_api_servers(silence=-1.0)) == 1
    assert world.raw.zrange(keys.apis(), 0, -1) == [alive.encode()]


# Usage


def add_lines(world: World, count: int, day: int = 20_000, tenant: str = "t") -> None:
    with world.raw.pipeline(transaction=False) as pipeline:
        for number in range(count):
            reason = ("stop", "length", "abort", "error")[number % 4]
            tokens = {"prompt_tokens": 3, "cached_tokens": 1, "output_tokens": 2}
            pipeline.xadd(keys.usage(world.model), {"day": day, "tenant": tenant, "reason": reason, **tokens})
        pipeline.execute()


def totals(world: World, day: int = 20_000, tenant: str = "t") -> UsageTotals:
    return world.bus.run(usage.usage_totals(world.model, date.fromordinal(date(1970, 1, 1).toordinal() + day)))[tenant]


def expected(count: int) -> UsageTotals:
    reasons = Counter(("stop", "length", "abort", "error")[number % 4] for number in range(count))
    return UsageTotals(count, 3 * count, count, 2 * count, dict(reasons))


def test_lines_become_sums_by_day_and_tenant(world: World) -> None:
    add_lines(world, 5)
    add_lines(world, 4, tenant="with:colon")
    add_lines(world, 3, day=20_001)
    assert world.bus.run(usage.roll_usage(world.model)) == 12
    assert totals(world) == expected(5)
    assert totals(world, tenant="with:colon") == expected(4)
    assert totals(world, day=20_001) == expected(3)
    assert world.bus.run(usage.usage_days(world.model)) == [date(2024, 10, 4), date(2024, 10, 5)]
    assert world.raw.pttl(keys.usage_day(world.model, 20_000)) > 0
    assert world.bus.run(usage.roll_usage(world.model)) == 0
    assert totals(world) == expected(5)


def test_batches_follow_until_the_index_is_clean_or_the_limit_is_reached(world: World) -> None:
    add_lines(world, 2 * ROLL_BATCH + 7)
    assert world.bus.run(usage.roll_usage(world.model, most=ROLL_BATCH)) == ROLL_BATCH
    assert world.bus.run(usage.roll_usage(world.model)) == ROLL_BATCH + 7
    assert totals(world) == expected(2 * ROLL_BATCH + 7)


def test_concurrent_runs_count_each_line_once(world: World) -> None:
    add_lines(world, 5000)
    threads = [threading.Thread(target=lambda: world.bus.run(usage.roll_usage(world.model))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals(world) == expected(5000)
    assert world.usage_lines() == []


def test_a_lost_answer_counts_no_line_twice(world: World) -> None:
    add_lines(world, 100)
    with LossyProxy(world.url) as proxy, Bus(proxy.url) as bus:
        bus.run(queue_depth(world.model))
        proxy.losses = 1
        assert bus.run(usage.roll_usage(world.model)) == 0
        assert proxy.lost == 1
    assert totals(world) == expected(100)


def test_days_whose_sums_ran_out_leave_the_index(world: World) -> None:
    add_lines(world, 1, day=20_000)
    add_lines(world, 1, day=20_300)
    world.bus.run(usage.roll_usage(world.model))
    world.bus.run(usage.forget_days(world.model, date(2024, 10, 4)))
    assert len(world.bus.run(usage.usage_days(world.model))) == 2
    world.bus.run(usage.forget_days(world.model, date(2025, 11, 9)))
    assert world.bus.run(usage.usage_days(world.model)) == [date(2025, 7, 31)]


def test_a_dead_engines_journal_goes_once_no_live_record_names_it(world: World) -> None:
    first = world.engine()
    world.enqueue(world.request("a"), world.request("b"))
    world.take(first, 2)
    world.bus.run(world.flush_call(first, ["b"], messages=[(CLIENT, b"tokens")]))
    journal = keys.journal(world.model, f"{first.slot}:{first.incarnation}")
    world.crash(first)
    assert world.bus.run(maintenance.forget_journals(world.model)) == 0, "its heartbeat may come back"
    world.take_over(first)
    second = world.engine()
    assert world.take(second) == ["a"]
    assert world.bus.run(maintenance.forget_journals(world.model)) == 0, "the output of `a` is in it"
    part = journals.OutputPart("a", b"all so far", "adopt")
    world.bus.run(journals.checkpoint(world.model, second.slot, second.incarnation, [part]))
    assert world.raw.exists(journal)
    assert world.bus.run(maintenance.forget_journals(world.model)) == 1
    assert not world.raw.exists(journal)
    world.bus.run(world.flush_call(second, ["a"], messages=[(CLIENT, b"tokens")]))
    assert world.raw.exists(keys.journal(world.model, f"{second.slot}:{second.incarnation}")), "its engine lives"
    assert world.bus.run(maintenance.forget_journals(world.model)) == 0


def test_journals_of_engines_that_stopped_or_claimed_their_slot_again_are_known(world: World) -> None:
    engine = world.engine()
    world.raw.flushall()
    world.bus.run(leases.reclaim_slot(world.model, engine.slot, engine.incarnation))
    assert world.bus.run(maintenance.forget_journals(world.model)) == 0
    world.take_over(engine, sure=True)
    assert world.bus.run(maintenance.forget_journals(world.model)) == 1
