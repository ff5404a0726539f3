"""Usage: one line an ended request, written by the script that ended it, rolled up into sums by tenant and day (UTC)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any, TypeVar

from engine.bus import keys
from engine.bus.call import Call, Command, milliseconds, script
from engine.bus.records import parse_fields
from engine.protocol import FinishReason

T = TypeVar("T")

ROLL_BATCH = 500  # lines in one script: Redis answers no other client meanwhile
DAYS_KEPT = 400
_EPOCH = date(1970, 1, 1)
_REASONS = frozenset(map(str, FinishReason))


@dataclass
class UsageTotals:
    """Sums of one tenant on one day. The prompt of a request counts when it had a first token."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens, those that the prefix cache answered
    output_tokens: int = 0
    reasons: dict[str, int] = field(default_factory=dict)  # str(FinishReason) -> requests


@dataclass(frozen=True)
class UsageRow:
    day: date  # UTC, of the request's end
    model: str
    tenant: str  # "" where requests came without a key
    totals: UsageTotals


def roll_usage(model: str, most: int = 100 * ROLL_BATCH) -> Call[int]:
    """Move lines into the sums until none is left, `most` at most; how many. Several may do it at once."""

    def batch(rolled: int) -> Call[int]:
        def decode(answer: Any) -> int | Call[int]:
            total = rolled + int(answer)
            return batch(total) if int(answer) == ROLL_BATCH and total < most else total

        roll_keys = (keys.usage(model), keys.usage_days(model), keys.usage_day(model))
        return Call(decode, script("roll_usage"), roll_keys, (ROLL_BATCH, milliseconds(DAYS_KEPT * 86400)))

    return batch(0)


def usage_days(model: str) -> Call[list[date]]:
    """Days that may have sums, oldest first."""

    def decode(answers: list[Any]) -> list[date]:
        return sorted(_EPOCH + timedelta(days=int(day)) for day in answers[0])

    return Call(decode, commands=(("SMEMBERS", keys.usage_days(model)),))


def usage_totals(model: str, day: date) -> Call[dict[str, UsageTotals]]:
    """The sums of a day by tenant."""
    return Call(lambda answers: _by_tenant(answers[0]), commands=_sums(model, [day]))


def _sums(model: str, days: Iterable[date]) -> tuple[Command, ...]:
    return tuple(("HGETALL", keys.usage_day(model, (day - _EPOCH).days)) for day in days)


def _by_tenant(answer: Any) -> dict[str, UsageTotals]:
    totals: dict[str, UsageTotals] = {}
    for name, value in parse_fields(answer).items():
        column, tenant = name.split(":", 1)
        row = totals.setdefault(tenant, UsageTotals())
        if column in _REASONS:
            row.reasons[column] = int(value)
        else:
            setattr(row, column, int(value))
    return totals


def usage_rows(model: str, since: date | None = None, until: date | None = None) -> Call[list[UsageRow]]:
    """All sums from `since` to `until`, both included, by day and tenant. Lines that maintenance has not counted yet are counted
    first."""

    def read(days: list[date]) -> Call[list[UsageRow]]:
        wanted = [day for day in days if (since is None or day >= since) and (until is None or day <= until)]

        def decode(answers: list[Any]) -> list[UsageRow]:
            found = zip(wanted, map(_by_tenant, answers), strict=True)
            return [UsageRow(day, model, tenant, by_tenant[tenant]) for day, by_tenant in found for tenant in sorted(by_tenant)]

        return Call(decode, commands=_sums(model, wanted))

    return roll_usage(model).then(lambda rolled: usage_days(model).then(read))


def forget_days(model: str, today: date) -> Call[None]:
    """Take days whose sums have run out off the index."""

    def choose(days: list[date]) -> Call[None]:
        old = [(day - _EPOCH).days for day in days if (today - day).days > DAYS_KEPT]
        commands: list[Command] = [("SREM", keys.usage_days(model), *old)] if old else []
        return Call(lambda answers: None, commands=tuple(commands))

    return usage_days(model).then(choose)
