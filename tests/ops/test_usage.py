"""Usage as `headrace usage` reads it: from the end of a request to its row."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

from engine.bus import keys, transitions, usage
from engine.bus.usage import UsageRow, UsageTotals
from ops.usage import usage_rows
from tests.engine.bus.ledger_world import World


def test_usage_rows_sum_ended_requests_by_model_and_tenant(redis_url: str) -> None:
    with World(redis_url, "model-a") as world, World(redis_url, "model-b") as other:
        for each, tenant in ((world, "alice"), (world, "bob"), (other, "alice")):
            each.enqueue(
                each.request("done", tokens=10, tenant=tenant) if tenant == "alice" else each.request("cut", tenant=tenant)
            )
            engine = each.engine()
            (taken,) = each.bus.run(each.take_call(engine))
            if tenant == "alice":
                each.end(engine, "done")
            else:
                each.bus.run(transitions.reject(each.model, engine.slot, engine.incarnation, taken.entry, "it cannot be run"))
        today = datetime.now(UTC).date()
        done = UsageTotals(1, 10, 1, 4, {"stop": 1})
        expected = [
            UsageRow(today, "model-a", "alice", done),
            UsageRow(today, "model-a", "bob", UsageTotals(1, 0, 0, 0, {"error": 1})),
            UsageRow(today, "model-b", "alice", done),
        ]
        assert usage_rows(world.bus) == expected
        assert usage_rows(world.bus) == expected, "reading counts nothing twice"
        assert usage_rows(world.bus, since=today, until=today) == expected
        assert usage_rows(world.bus, since=today + timedelta(days=1)) == []
        assert usage_rows(world.bus, until=today - timedelta(days=1)) == []


def test_rows_are_in_order_of_days(redis_url: str) -> None:
    with World(redis_url, "model-a") as world:
        world.engine()
        for day in (20_002, 20_000, 20_001):
            line = {"day": day, "tenant": "", "reason": "stop", "prompt_tokens": 1, "cached_tokens": 0, "output_tokens": 1}
            world.raw.xadd(keys.usage(world.model), line)
        rows = usage_rows(world.bus, since=date(2024, 10, 4), until=date(2024, 10, 5))
        assert [row.day for row in rows] == [date(2024, 10, 4), date(2024, 10, 5)]
        assert world.bus.run(usage.usage_days(world.model))[-1] == date(2024, 10, 6)
