"""How connections of redis-py are made, and how they begin: with one question, so that a Redis that lets no client in is heard.

Such a Redis says why (it has too many clients, or takes none of other machines) and hangs up. The reason is there before anything
was asked: pools take it for an answer too many, and commands sent one behind the other break before it is read.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, ResponseError
from redis.retry import Retry

from engine.bus.refusals import trouble_of


def _begin(connection: Any) -> None:
    connection.on_connect()
    connection.send_command("ECHO", "", check_health=False)
    try:
        connection.read_response()
    except ResponseError as error:
        _raise_unless_let_in(error)


async def _begin_async(connection: Any) -> None:
    await connection.on_connect()
    await connection.send_command("ECHO", "", check_health=False)
    try:
        await connection.read_response()
    except ResponseError as error:
        _raise_unless_let_in(error)


def _raise_unless_let_in(error: ResponseError) -> None:
    if trouble_of(error) is not None:
        raise error  # any other: the user may not ECHO, but is in


# Options of a connection, blocking and for asyncio. redis-py would introduce itself first (`driver_info`), in two commands.
HANDSHAKE: dict[str, Any] = {"driver_info": None, "redis_connect_func": _begin}
ASYNC_HANDSHAKE: dict[str, Any] = {"driver_info": None, "redis_connect_func": _begin_async}


def connection_options(timeout: float) -> dict[str, Any]:
    """Keyword arguments of a pool of blocking connections. Answers come raw (RESP2) and retrying is the bus's own business.

    A connection to what has become a replica is closed: the name that it was opened by may stand for the new master.
    """
    return {**_common_options(timeout), **HANDSHAKE, "retry": Retry(NoBackoff(), 0)}


def async_connection_options(timeout: float) -> dict[str, Any]:
    """As `connection_options`, for asyncio."""
    return {**_common_options(timeout), **ASYNC_HANDSHAKE, "retry": AsyncRetry(NoBackoff(), 0)}


def _common_options(timeout: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "protocol": 2,
        "retry_on_error": [ReadOnlyError],  # not once more, as `retry` says: redis-py closes what it would try again on
    }
