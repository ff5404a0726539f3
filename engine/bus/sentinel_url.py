"""URLs of Sentinels, taken apart. `serve` checks its URL before it loads a Redis client, which takes long: nothing here imports one
before a URL is of that kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

SENTINEL_SECONDS = 0.5  # for one Sentinel to answer; then the next one is asked
SENTINEL_PREFIX = "sentinel_"  # of options that are for the Sentinels


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
        from redis.connection import parse_url

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
