"""Celery's connections: a Redis that cannot serve is to them one that is away, and says why."""

from __future__ import annotations

from collections.abc import Iterator

import kombu
import pytest
import redis

from ops import broker
from ops.redis_url import parse_redis_url
from tests.redis_sentinel import SentinelSetup
from tests.redis_server import RedisServer


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kombu.transport.TRANSPORT_ALIASES", dict(kombu.transport.TRANSPORT_ALIASES))
    broker.install()


@pytest.mark.parametrize(
    ("said", "begin", "end"),
    [
        ("is a read-only replica", "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
        ("lacks the replicas", "CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
        ("is out of memory", "CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
        ("has as many clients as it allows", "CONFIG SET maxclients 1", "CONFIG SET maxclients 1000"),
    ],
)
def test_what_keeps_redis_from_serving_is_waited_for(server: RedisServer, said: str, begin: str, end: str) -> None:
    """At the start of a connection, and in the middle of one."""
    url = parse_redis_url(server.url).broker
    with redis.Redis.from_url(server.url) as raw, kombu.Connection(url) as running, kombu.Connection(url) as starting:
        queue = running.SimpleQueue("q")
        queue.put("before")
        raw.execute_command(*begin.split())
        try:
            if "maxclients" in begin:
                raw.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(running.connection_errors, match=said):
                queue.put("during")
            with pytest.raises(kombu.exceptions.OperationalError, match=said):
                starting.ensure_connection(max_retries=1, interval_start=0)
        finally:
            raw.execute_command(*end.split())
        starting.ensure_connection(max_retries=1)
        queue.close()


def test_celery_follows_a_failover() -> None:
    setup = SentinelSetup()
    try:
        url = parse_redis_url(setup.url)
        with kombu.Connection(url.broker, transport_options=url.broker_options) as connection:
            queue = connection.SimpleQueue("q")
            queue.put("before")
            setup.kill_master()
            with pytest.raises(connection.connection_errors):
                queue.get(timeout=5)
            queue.close()
        with kombu.Connection(url.broker, transport_options=url.broker_options) as connection:
            queue = connection.SimpleQueue("q")
            assert queue.get(timeout=5).payload == "before"
            queue.close()
    finally:
        setup.stop()
