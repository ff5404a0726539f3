"""Maintenance: ends requests that no client waits for, frees those of dead engines for others, expires records, sums usage.

Each task does a bounded piece and leaves the rest to its next run; where Redis is away it does nothing, for the same reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache, wraps

from engine.bus import failover, leases, maintenance, transitions, usage
from engine.bus.attachments import detach
from engine.bus.call import BusUnavailable
from engine.bus.clock import redis_time
from engine.bus.connection import Bus
from engine.bus.deadlines import expire_late
from engine.protocol import Abort
from ops.celery_app import REDIS_URL, app

logger = logging.getLogger(__name__)

API_GONE = "The API server of this request is gone."
FORGET_API_SERVER_SECONDS = 60.0


@cache
def process_bus() -> Bus:
    """This process's connections. The solo pool runs tasks in the worker itself, so that no fork shares them."""
    return Bus(str(REDIS_URL))


def _unless_redis_is_away(work: Callable[[Bus], int]) -> Callable[[], int]:
    @wraps(work)
    def task() -> int:
        try:
            return work(process_bus())
        except BusUnavailable as error:
            logger.warning("%s waits for its next run: %s", work.__name__, error)
            return 0

    del task.__wrapped__  # Celery would read the signature with the bus off it
    return task


@app.task
@_unless_redis_is_away
def reap_api_servers(bus: Bus) -> int:
    """End the requests of API servers that are gone, because no client waits for them; a resumable one when its grace time has
    passed. Returns how many."""
    reaped = 0
    for model in bus.run(leases.models()):
        clients = filter(None, bus.run(maintenance.clients(model)))
        dead = frozenset(client for client in clients if bus.run(leases.api_absent(client)))
        for request_id, client in bus.run(maintenance.requests_of(model, dead)) if dead else ():
            if bus.run(detach(model, request_id, client)) == 0.0:
                bus.run(transitions.finish(model, request_id, Abort(request_id), API_GONE))
                reaped += 1
    return reaped


@app.task
@_unless_redis_is_away
def take_over_dead_engines(bus: Bus) -> int:
    """Let the requests of dead engines wait for the next engine. Returns how many there were."""
    taken = 0
    for model in bus.run(leases.models()):
        for dead in bus.run(leases.dead_engines(model)):
            taken += sum(bus.run(failover.takeover(model, dead.slot, dead.incarnation)))
    return taken


@app.task
@_unless_redis_is_away
def expire_late_requests(bus: Bus) -> int:
    """End requests that are past their deadline. Returns how many."""
    return sum(sum(bus.run(expire_late(model))) for model in bus.run(leases.models()))


@app.task
@_unless_redis_is_away
def expire_records(bus: Bus) -> int:
    """Remove expired records from the indexes, and journals that nobody needs. Returns how many records."""
    forgotten = 0
    today = datetime.fromtimestamp(bus.run(redis_time()), UTC).date()
    for model in bus.run(leases.models()):
        forgotten += bus.run(maintenance.forget_records(model))
        bus.run(usage.forget_days(model, today))
        bus.run(maintenance.forget_journals(model))
    bus.run(maintenance.forget_api_servers(FORGET_API_SERVER_SECONDS))
    return forgotten


@app.task
@_unless_redis_is_away
def roll_usage(bus: Bus) -> int:
    """Move usage lines into the sums by tenant and day. Returns how many."""
    return sum(bus.run(usage.roll_usage(model)) for model in bus.run(leases.models()))
