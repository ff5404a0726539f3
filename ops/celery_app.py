"""The Celery application of the maintenance process, on the same Redis as the bus.

`headrace maintenance` runs it, and so does `celery -A ops.celery_app worker -B --pool solo`.

Every task is short, safe to run twice and at the same time, and acknowledged after it is done. So the death of the process loses
nothing, and the next beat would do the work anyway. Importing this loads neither torch nor the API server.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.signals import beat_embedded_init

from ops import broker, parent_death
from ops.redis_url import parse_redis_url

_WORKER = os.getpid()  # beat is forked from it and inherits the number
REDIS_URL = parse_redis_url(os.environ.get("HEADRACE_REDIS_URL") or "redis://127.0.0.1:6379/0")

# Seconds between two runs. A message that a worker did not get to before the next one was due is dropped: nothing piles up.
SCHEDULE = {
    "reap_api_servers": 2.0,
    "take_over_dead_engines": 2.0,
    "expire_late_requests": 10.0,  # for the time without an API server: each of those does it twice a second
    "roll_usage": 3.0,
    "expire_records": 30.0,
}

broker.install()
app = Celery("headrace", broker=REDIS_URL.broker, include=["ops.tasks"])
app.conf.update(
    accept_content=["json"],
    task_serializer="json",
    result_serializer="json",
    task_ignore_result=True,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    task_default_queue="maintenance",
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    # A killed worker's message comes back after this many seconds. The tasks take a few at most.
    broker_transport_options={"visibility_timeout": 60, "global_keyprefix": "headrace:celery:", **REDIS_URL.broker_options},
    worker_enable_remote_control=False,
    worker_send_task_events=False,
    worker_hijack_root_logger=False,
    beat_scheduler="ops.beat:Scheduler",
    beat_max_loop_interval=1.0,
    beat_schedule={
        name: {"task": f"ops.tasks.{name}", "schedule": seconds, "options": {"expires": seconds}}
        for name, seconds in SCHEDULE.items()
    },
    enable_utc=True,
    timezone="UTC",
)


@beat_embedded_init.connect
def _die_with_the_worker(**_: Any) -> None:
    """Beat is the worker's child process; a worker killed with -9 must not leave it behind."""
    parent_death.die_with_parent(_WORKER)
