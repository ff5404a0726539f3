"""From a URL to pools of connections: to one server, or to the master that Sentinels name.

`redis://`, `rediss://` (TLS) and `unix://` are redis-py's URLs of one server. `redis+sentinel://` and `rediss+sentinel://` name
Sentinels in place of the host, and before the database the name that they know the master by:

    redis+sentinel://USER:PASSWORD@HOST1:26379,HOST2:26379/NAME/DATABASE?sentinel_username=USER&sentinel_password=PASSWORD

Each new connection asks a Sentinel where the master is, so that it leads to the new one after a failover.
"""

from __future__ import annotations

import threading
from typing import Any

import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from engine.bus.handshake import async_connection_options, connection_options
from engine.bus.sentinel_url import SentinelUrl, is_of_sentinels


class Servers:
    """Of blocking connections. `pool` may be called on any thread. Raises ValueError for a URL that is none."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._master: _Master | None = None
        self._options: dict[str, Any] = {}
        if is_of_sentinels(url):
            named = SentinelUrl.parse(url)
            kind = redis.sentinel.SentinelManagedSSLConnection if named.tls else redis.sentinel.SentinelManagedConnection
            of_sentinels = {**named.sentinel_options, "retry": Retry(NoBackoff(), 0)}
            sentinel: Any = redis.sentinel.Sentinel
            self._master = _Master(sentinel(named.sentinels, sentinel_kwargs=of_sentinels), named.service)
            self._options = {**named.server_options, "connection_class": kind, "connection_pool": self._master}

    def pool(self, seconds: float, kind: Any = redis.ConnectionPool, **more: Any) -> Any:
        """`seconds`: for one answer. `more`: options of the pool and its connections."""
        options = {**connection_options(seconds), **more}
        return kind(**self._options, **options) if self._master else kind.from_url(self._url, **options)

    def close(self) -> None:
        """Hang up on the Sentinels. Pools are their owners' to close."""
        if self._master:
            self._master.close()


class AsyncServers:
    """As Servers, for asyncio; belongs to one event loop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._master: _AsyncMaster | None = None
        self._options: dict[str, Any] = {}
        if is_of_sentinels(url):
            named = SentinelUrl.parse(url)
            plain, with_tls = redis.asyncio.sentinel.SentinelManagedConnection, redis.asyncio.sentinel.SentinelManagedSSLConnection
            of_sentinels = {**named.sentinel_options, "retry": AsyncRetry(NoBackoff(), 0)}
            sentinel: Any = redis.asyncio.sentinel.Sentinel
            self._master = _AsyncMaster(sentinel(named.sentinels, sentinel_kwargs=of_sentinels), named.service)
            kind = with_tls if named.tls else plain
            self._options = {**named.server_options, "connection_class": kind, "connection_pool": self._master}

    def pool(self, seconds: float, kind: Any = redis.asyncio.ConnectionPool, **more: Any) -> Any:
        options = {**async_connection_options(seconds), **more}
        return kind(**self._options, **options) if self._master else kind.from_url(self._url, **options)

    async def close(self) -> None:
        if self._master:
            await self._master.close()


class _Master:
    """What a connection of `redis.sentinel` asks for the address to connect to. redis-py's own pools would be this, but are not
    bounded, and their order of Sentinels is not safe among threads."""

    is_master = True
    check_connection = False

    def __init__(self, sentinel: Any, service: str) -> None:
        self.service_name = service
        self._sentinel = sentinel
        self._asking = threading.Lock()

    def get_master_address(self) -> tuple[str, int]:
        """Raises ConnectionError where no Sentinel answers, or the master is down and no replica has taken its place."""
        with self._asking:
            address: tuple[str, int] = self._sentinel.discover_master(self.service_name)
            return address

    def close(self) -> None:
        self._sentinel.close()


class _AsyncMaster:
    """As _Master. Many connections may ask at once."""

    is_master = True
    check_connection = False

    def __init__(self, sentinel: Any, service: str) -> None:
        self.service_name = service
        self._sentinel = sentinel

    async def get_master_address(self) -> tuple[str, int]:
        address: tuple[str, int] = await self._sentinel.discover_master(self.service_name)
        return address

    async def close(self) -> None:
        await self._sentinel.aclose()
