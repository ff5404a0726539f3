"""The rows of `headrace usage`: requests and tokens by day, model and tenant."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from engine.bus import leases, usage
from engine.bus.connection import Bus
from engine.bus.usage import UsageTotals


@dataclass(frozen=True)
class UsageRow:
    day: date  # UTC, of the request's end
    model: str
    tenant: str  # "" where requests came without a key
    totals: UsageTotals


def usage_rows(bus: Bus, since: date | None = None, until: date | None = None) -> list[UsageRow]:
    """All sums from `since` to `until`, both included, by day, model and tenant. Raises BusUnavailable.

    Lines that maintenance has not counted yet are counted now.
    """
    rows = []
    for model in bus.run(leases.models()):
        bus.run(usage.roll_usage(model))
        for day in bus.run(usage.usage_days(model)):
            if (since is None or day >= since) and (until is None or day <= until):
                totals = bus.run(usage.usage_totals(model, day))
                rows += [UsageRow(day, model, tenant, totals[tenant]) for tenant in sorted(totals)]
    return sorted(rows, key=lambda row: (row.day, row.model, row.tenant))
