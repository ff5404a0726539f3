"""Whether the queue of a model would take a request now, by the numbers of half a second ago; and how long what waits there waits.

The script `enqueue` decides by the numbers of the moment. To ask here first saves the work of preparing what it would refuse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.bus.enqueue import QUEUE_LIMITS, AdmissionLimits, Refused
from engine.bus.queue_depth import QueueDepth, TenantLoad
from engine.protocol import EngineInfo

LEAST_WAITING = 8  # choices that may wait for each seat of the engines while their pace is unknown
LONGEST_RETRY = 60  # seconds


def service_rate(engines: Sequence[EngineInfo]) -> float:
    """Choices a second that the engines together begin while requests wait, as they measured it; 0.0: not known yet. An engine that
    has not measured it counts as the others on average."""
    known = [engine.stats.choices_per_second for engine in engines if engine.stats.choices_per_second > 0]
    return sum(known) / len(known) * len(engines) if known else 0.0


def num_free_seats(engines: Sequence[EngineInfo]) -> int:
    return sum(max(0, each.max_num_seqs - each.stats.num_running - each.stats.num_waiting) for each in engines)


def estimated_wait(num_before: int, engines: Sequence[EngineInfo]) -> float | None:
    """Seconds that a request waits with so many before it; None: no pace is known yet."""
    num_behind_seats = num_before - num_free_seats(engines) + 1
    if num_behind_seats <= 0:
        return 0.0
    rate = service_rate(engines)
    return num_behind_seats / rate if rate else None


def limits_by_pace(limits: AdmissionLimits, engines: Sequence[EngineInfo], max_queue_seconds: float) -> AdmissionLimits:
    """`limits` with the number of choices that may wait, so that the last one waits for `max_queue_seconds` (0: for ever). Without
    an engine no pace is known."""
    if not max_queue_seconds or not engines:
        return limits
    seats = sum(engine.max_num_seqs for engine in engines)
    rate = service_rate(engines)
    by_pace = math.ceil(rate * max_queue_seconds) if rate else LEAST_WAITING * seats
    return replace(limits, max_num_waiting=max(by_pace, seats))


def foresee(
    depth: QueueDepth, limits: AdmissionLimits, tenant: str, weight: float = 1.0, weights: Mapping[str, float] | None = None
) -> Refused | None:
    """The refusal of one more choice of a tenant; None: it would be taken. `weights`: of all tenants, where they are not 1."""
    everybody, own = depth.everybody, depth.tenants.get(tenant, TenantLoad())
    others = sum((weights or {}).get(name, 1.0) for name in depth.tenants if name != tenant)
    share = weight / (weight + others)
    most = (limits.max_num_queued_reqs, limits.max_num_queued_tokens, limits.max_num_waiting)
    for reason, limit, name in zip(QUEUE_LIMITS, most, ("requests", "tokens", "waiting"), strict=True):
        new = 1 if name == "requests" else 0
        value, its = getattr(everybody, name) + new, getattr(own, name) + new
        if limit is None or value + 1 - new <= limit:
            continue
        if not others:
            return Refused(reason, value, limit)
        if its > limit * share or (not new and its == limit * share):
            return Refused(reason, its, math.floor(limit * share), of_tenant=True)
    return None


def retry_after(refusal: Refused, engines: Sequence[EngineInfo]) -> int:
    """Whole seconds after which the queue may have room for the request."""
    rate = service_rate(engines)
    if not rate or refusal.reason == "max_num_queued_tokens":
        return 1
    return min(LONGEST_RETRY, max(1, math.ceil((refusal.value - refusal.limit) / rate)))
