"""The publisher while Redis is away: it holds so much, pauses the engine, and lets it go when it must stop."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path

from engine.bus.connection import Bus
from engine.protocol import ControlReply
from engine.runtime.owned_requests import OwnedRequests
from engine.runtime.publisher import MOST_WAITING_EVENTS, Publisher, StepEvents
from engine.runtime.reconciliation import Reconciler
from engine.runtime.slot_owner import SlotOwner
from tests.engine.bus.ledger_world import engine_info


def test_an_engine_told_to_stop_does_not_wait_for_redis(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    num_put = 0
    with Bus(f"unix://{tmp_path}/nobody.sock") as bus:
        owner, owned = SlotOwner(bus, engine_info("model")), OwnedRequests()
        publisher = Publisher(owner, owned, Reconciler(owner, owned, queue.SimpleQueue()), [], failures.append)
        publisher.start()

        def put() -> None:
            nonlocal num_put
            for _ in range(MOST_WAITING_EVENTS + 3):
                publisher.put(StepEvents(replies=[("api", ControlReply("token"))]))
                num_put += 1

        engine = threading.Thread(target=put)
        engine.start()
        engine.join(1.0)
        assert engine.is_alive() and num_put <= MOST_WAITING_EVENTS + 1, "one is in flight, the rest waits"
        publisher.give_up_at(time.monotonic())
        engine.join(5.0)
        assert not engine.is_alive()
        started = time.monotonic()
        publisher.close(timeout=0.2)
        assert time.monotonic() - started < 2.0 and not failures
        publisher._thread.join(5.0)
        assert not publisher._thread.is_alive(), "it would look for Redis for ever"
