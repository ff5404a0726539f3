"""The rows of `headrace usage`: requests and tokens by day, model and tenant."""

from __future__ import annotations

from datetime import date

from engine.bus import leases, usage
from engine.bus.connection import Bus
from engine.bus.usage import UsageRow


def usage_rows(bus: Bus, since: date | None = None, until: date | None = None) -> list[UsageRow]:
    """Those of all models, from `since` to `until`, both included, by day, model and tenant. Raises BusUnavailable."""
    rows = [row for model in bus.run(leases.models()) for row in bus.run(usage.usage_rows(model, since, until))]
    return sorted(rows, key=lambda row: (row.day, row.model, row.tenant))
