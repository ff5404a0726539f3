"""How a connection of redis-py begins: with one question, so that a Redis that lets no client in is heard.

Such a Redis says why (it has too many clients, or takes none of other machines) and hangs up. The reason is there before anything
was asked: pools take it for an answer too many, and commands sent one behind the other break before it is read.
"""

from __future__ import annotations

from typing import Any

from redis.exceptions import ResponseError

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
