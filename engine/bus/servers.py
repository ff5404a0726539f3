"""From a URL to pools of connections: to one server, or to the master that Sentinels name.

`redis://`, `rediss://` (TLS) and `unix://` are redis-py's URLs of one server. `redis+sentinel://` and `rediss+sentinel://` name
Sentinels in place of the host, and before the database the name that they know the master by:

    redis+sentinel://USER:PASSWORD@HOST1:26379,HOST2:26379/NAME/DATABASE?sentinel_username=USER&sentinel_password=PASSWORD

Each new connection asks a Sentinel where the master is, so that it leads to the new one after a failover.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from engine.bus.handshake import async_connection_options, connection_options

SENTINEL_SECONDS = 0.5  # for one Sentinel to answer; then the next one is asked
SENTINEL_PREFIX = "sentinel_"  # of options that are for the Sentinels


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


def is_of_sentinels(url: str) -> bool:
    return url.partition("://")[0].endswith("+sentinel")


@dataclass(frozen=True)
class SentinelUrl:
    """A URL of Sentinels taken apart, as keyword arguments of redis-py's clients."""

    sentinels: list[tuple[str, int]]
    sentinel_options: dict[str, Any]
    service: str  # the master's name
    server_options: dict[str, Any]
    tls: bool

    @staticmethod
    def parse(url: str) -> SentinelUrl:
        """Raises ValueError."""
        parts = urlsplit(url)
        tls = parts.scheme.startswith("rediss")
        credentials, _, hosts = parts.netloc.rpartition("@")
        service, _, database = parts.path.strip("/").partition("/")
        given = parse_qsl(parts.query)
        of_sentinels = {name.removeprefix(SENTINEL_PREFIX): value for name, value in given if name.startswith(SENTINEL_PREFIX)}
        others = urlencode([each for each in given if not each[0].startswith(SENTINEL_PREFIX)])
        server: dict[str, Any] = parse_url(f"{'rediss' if tls else 'redis'}://{credentials}@/{database or 0}?{others}")  # type: ignore[no-untyped-call]
        server.pop("connection_class", None)
        timeouts = {"socket_timeout": SENTINEL_SECONDS, "socket_connect_timeout": SENTINEL_SECONDS}
        ssl = {name: value for name, value in server.items() if name.startswith("ssl_")}
        return SentinelUrl(
            [_address(host) for host in hosts.split(",")],
            {**of_sentinels, **ssl, **timeouts, "ssl": tls, "driver_info": None, "protocol": 2},
            unquote(service),
            server,
            tls,
        )


def _address(host: str) -> tuple[str, int]:
    parts = SplitResult("", host, "", "", "")
    if parts.hostname is None or parts.port is None:
        raise ValueError("a Sentinel is named HOST:PORT")
    return unquote(parts.hostname), parts.port
