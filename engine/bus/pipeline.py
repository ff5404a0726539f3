"""One connection to Redis that many tasks use at once: their commands go out as they come, the answers come back in that order.

A pooled connection belongs to one task from its command to the answer, so that each task pays for its own write, read and timeout.
Here all commands of one turn of the event loop are one write, and their answers mostly one read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from redis.exceptions import ConnectionError, InvalidResponse, TimeoutError

from engine.bus.call import Command
from engine.bus.resp import Answers, pack


class Line(asyncio.Protocol):
    """Made by `open_line`. Once closed, it stays closed, and the caller opens another.

    A caller that waits then gets a ConnectionError, or a TimeoutError if Redis was silent for `timeout` seconds. For short commands
    only: one that Redis holds back delays all that follow.
    """

    def __init__(self, connection: Any, timeout: float) -> None:
        """`connection`: an open one of redis-py, which from now on is used without redis-py."""
        self.closed = False
        self._connection = connection  # kept, because it closes the socket when it is deleted
        self._transport: asyncio.Transport = connection._writer.transport
        self._loop = asyncio.get_running_loop()
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None
        self._answers = Answers()
        self._unsent: list[bytes] = []
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()  # with the time of asking, the loop's
        self._transport.set_protocol(self)

    async def ask(self, command: Command) -> Any:
        """Its answer. Raises RedisError: what Redis says, or that nothing is known of what became of the command."""
        if self.closed:
            raise ConnectionError("the connection is closed")
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(pack(*command))
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append((answer, self._loop.time()))
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout, self._look)
        return await answer

    def close(self, error: Exception | None = None) -> None:
        """Idempotent. `error` is raised in the callers that wait."""
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._transport.abort()
        self._connection._close()
        for answer, _ in self._waiting:
            if not answer.done():
                answer.set_exception(error or ConnectionError("the connection was closed"))
        self._waiting.clear()

    def _send(self) -> None:
        if not self.closed:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def _look(self) -> None:
        """One timer for all: is the answer that is due next overdue?"""
        self._timer = None
        if not self._waiting:
            return
        due = self._waiting[0][1] + self._timeout
        if due <= self._loop.time():
            self.close(TimeoutError("no answer in time"))
        else:
            self._timer = self._loop.call_at(due, self._look)

    # What the transport calls

    def data_received(self, data: bytes) -> None:
        try:
            answers = self._answers.feed(data)
        except (InvalidResponse, ValueError) as error:
            self.close(ConnectionError(f"no answer of Redis': {error}"))
            return
        if len(answers) > len(self._waiting):
            self.close(ConnectionError("an answer without a question"))
            return
        for value in answers:
            answer, _ = self._waiting.popleft()
            if answer.done():  # its caller was cancelled
                continue
            if isinstance(value, Exception):
                answer.set_exception(value)
            else:
                answer.set_result(value)

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(ConnectionError(f"the connection was lost: {exc or 'Redis closed it'}"))


async def open_line(pool: Any, timeout: float) -> Line:
    """On a new connection like those of `pool`: redis-py does what it takes to be let in. `timeout`: seconds for one answer. Raises
    RedisError, OSError."""
    connection = pool.make_connection()
    try:
        await connection.connect()
        return Line(connection, timeout)
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
