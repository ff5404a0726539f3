"""Celery's connections to Redis, which wait for a Redis that cannot serve as they do for one that is away.

kombu waits for broken connections alone. A read-only replica, or a Redis out of memory, looks like a fault of the program to it,
and the worker ends. Here `engine.bus.refusals` says which errors are of that kind, and kombu hears of a broken connection.
"""

from __future__ import annotations

from typing import Any

import kombu.transport
from kombu.transport import redis as kombu_redis
from redis.exceptions import ConnectionError, ResponseError

from engine.bus.call import BusUnavailable
from engine.bus.handshake import HANDSHAKE
from engine.bus.refusals import as_bus_error

PROBE = "headrace:celery:probe"  # a key that is gone at once


def install() -> None:
    """Make kombu use it for all connections to a Redis that this process opens from now on."""
    one, of_sentinels = (f"{__name__}:{kind.__name__}" for kind in (Transport, SentinelTransport))
    kombu.transport.TRANSPORT_ALIASES.update({"redis": one, "rediss": one, "sentinel": of_sentinels})


class _Waiting:
    """A Redis that takes no writes lets no channel begin, so that kombu waits with growing pauses for the next attempt."""

    client: Any  # of the channel, as is `close`
    close: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            self.client.execute_command("SET", PROBE, "", "PX", 1)
        except Exception:
            self.close()
            raise

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        options: dict[str, Any] = super()._connparams(asynchronous)  # type: ignore[misc]  # kombu is untyped
        return {**options, **HANDSHAKE, "connection_class": _waited_for(options["connection_class"])}


class Channel(_Waiting, kombu_redis.Channel):
    """To one server."""


class Transport(kombu_redis.Transport):
    Channel = Channel


class SentinelChannel(_Waiting, kombu_redis.SentinelChannel):
    """To the master that Sentinels name."""


class SentinelTransport(kombu_redis.SentinelTransport):
    Channel = SentinelChannel


def _waited_for(kind: type[Any]) -> type[Any]:
    """The same class of connections, whose errors are as above."""

    class Connection(kind):  # type: ignore[misc]
        def read_response(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().read_response(*args, **kwargs)
            except (ResponseError, ConnectionError) as error:
                told = as_bus_error(error)
                if isinstance(told, BusUnavailable):
                    raise ConnectionError(str(told)) from error
                raise

    return Connection
