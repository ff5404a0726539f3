"""Subscriptions: one connection each that listens to channels, and doubts a connection on which nothing comes."""

from __future__ import annotations

import time
from typing import Any

from redis.exceptions import RedisError

from engine.bus.call import BusUnavailable
from engine.bus.refusals import as_bus_error
from engine.bus.servers import AsyncServers, Servers

SHORTEST_READ = 0.001  # seconds; a read without any would not look at the socket
PING_INTERVAL = 5.0  # seconds of silence after which a subscription asks whether the connection still lives


class _Silence:
    """The time since a connection was heard. After PING_INTERVAL it is asked for a sign, and has `timeout` seconds to answer."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.heard()

    def heard(self) -> None:
        """Something came on the connection."""
        self._since = time.monotonic()
        self._asked = 0.0

    def should_ask(self) -> bool:
        """Whether to ask for a sign now, after a read that gave nothing. Raises BusUnavailable when the answer is overdue."""
        now = time.monotonic()
        if self._asked and now - self._asked >= self._timeout:
            raise BusUnavailable("the subscribed connection is silent")
        if self._asked or now - self._since < PING_INTERVAL:
            return False
        self._asked = now
        return True

    def longest_read(self, deadline: float | None) -> float:
        """Seconds that the next read may take, up to the caller's deadline."""
        most = self._timeout if self._asked else PING_INTERVAL
        return most if deadline is None else max(SHORTEST_READ, min(most, deadline - time.monotonic()))


class Subscription:
    """One connection that listens to channels. It never reconnects by itself: a hole in what was heard must be seen, so that its
    owner subscribes anew and asks for what it missed. Raises BusUnavailable where the connection broke or fell silent, UnfitRedis
    where the user may not listen.
    """

    def __init__(self, servers: Servers, channels: tuple[str, ...], timeout: float) -> None:
        self._pool = servers.pool(timeout)
        self._connection = self._pool.make_connection()
        self._timeout = timeout
        try:
            self._connection.connect()
            self._connection.send_command("SUBSCRIBE", *channels)
            for _ in channels:
                self._connection.read_response(timeout=timeout)
        except (RedisError, OSError) as error:
            self.close()
            raise as_bus_error(error) from error
        self._silence = _Silence(timeout)

    def get(self, timeout: float) -> tuple[str, bytes] | None:
        """The next (channel, payload), or None after `timeout` seconds without one."""
        deadline = time.monotonic() + timeout
        while True:
            message = self._read(self._silence.longest_read(deadline))
            if message is not None and message[0] == b"message":
                return message[1].decode(), message[2]
            if time.monotonic() >= deadline:
                return None

    def _read(self, timeout: float) -> Any:
        try:
            if self._connection.can_read(timeout):
                message = self._connection.read_response(timeout=self._timeout)
                self._silence.heard()
                return message
            if self._silence.should_ask():
                self._connection.send_command("PING", check_health=False)
        except (RedisError, OSError) as error:
            raise as_bus_error(error) from error
        return None

    def close(self) -> None:
        self._connection.disconnect()
        self._pool.disconnect()


class AsyncSubscription:
    """As Subscription. One task at a time may call `get`; a cancelled `get` closes the subscription."""

    def __init__(self, servers: AsyncServers, channels: tuple[str, ...], timeout: float) -> None:
        self._pool = servers.pool(timeout)
        self._connection = self._pool.make_connection()
        self._channels = channels
        self._timeout = timeout
        self._silence = _Silence(timeout)

    async def open(self) -> None:
        try:
            await self._connection.connect()
            await self._connection.send_command("SUBSCRIBE", *self._channels)
            for _ in self._channels:
                await self._connection.read_response(timeout=self._timeout)
        except (RedisError, OSError) as error:
            await self.close()
            raise as_bus_error(error) from error
        self._silence = _Silence(self._timeout)

    async def get(self, timeout: float | None = None) -> tuple[str, bytes] | None:
        """The next (channel, payload), or None after `timeout` seconds without one (None: waits for ever)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            message = await self._read(self._silence.longest_read(deadline))
            if message is not None and message[0] == b"message":
                return message[1].decode(), message[2]
            if deadline is not None and time.monotonic() >= deadline:
                return None

    async def _read(self, timeout: float) -> Any:
        try:
            message = await self._connection.read_response(timeout=timeout)
            if message is not None:
                self._silence.heard()
            elif self._silence.should_ask():
                await self._connection.send_command("PING", check_health=False)
        except (RedisError, OSError) as error:
            raise as_bus_error(error) from error
        return message

    async def close(self) -> None:
        await self._connection.disconnect()
        await self._pool.disconnect()
