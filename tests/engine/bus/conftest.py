"""Servers of the bus's tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.redis_server import RedisServer


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A Redis with an append-only file, which a test may kill or stop."""
    server = RedisServer(None, "--appendonly", "yes", "--appendfsync", "always")
    yield server
    if server.process is not None:
        server.process.send_signal(signal.SIGCONT)
    server.stop()
