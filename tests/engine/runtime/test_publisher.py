"""The publisher while Redis is away: it holds so much, pauses the engine, and lets it go when it must stop."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from engine.bus.connection import Bus
from engine.protocol import ControlReply
from engine.runtime.publisher import MOST_WAITING_EVENTS, Publisher, StepEvents


def test_an_engine_told_to_stop_does_not_wait_for_redis(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    num_put = 0
    with Bus(f"unix://{tmp_path}/nobody.sock") as bus:
        publisher = Publisher(bus, "model", "0", 1, [], failures.append)
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
