"""The way to Redis: `Bus` (blocking, any thread) and `AsyncBus` (asyncio) run calls.

Both send a call again, with backoff, while Redis is away or loads, and raise BusUnavailable when their patience ends. They may,
because every call is safe to send twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis.exceptions import NoScriptError, RedisError

from engine.bus.call import Call, Trouble
from engine.bus.pipeline import Line, open_line
from engine.bus.refusals import as_bus_error, trouble_of
from engine.bus.servers import AsyncServers, Servers
from engine.bus.subscription import AsyncSubscription, Subscription

T = TypeVar("T")

TIMEOUT = 2.0  # seconds for one answer
PATIENCE = 5.0  # seconds after which an operation gives up
MAX_BLOCK = 5.0  # seconds that a blocking read may ask for
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.5

# It may serve again within the patience of a caller. All else is told at once.
_SOON_OVER = frozenset({Trouble.AWAY, Trouble.CLIENTS, Trouble.LOADING, Trouble.READ_ONLY})
# The name of the server, or its Sentinels, may by now stand for another one.
_IS_ELSEWHERE = frozenset({Trouble.READ_ONLY, Trouble.MASTER, Trouble.REPLICAS})


class _Patience:
    """How long to go on trying, and the pauses between."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._pause = FIRST_PAUSE

    def pause(self, error: Exception) -> float:
        """Seconds to wait before the next try; raises what `error` means when there is no time for one, or no use."""
        if trouble_of(error) not in _SOON_OVER or time.monotonic() + self._pause > self._deadline:
            raise as_bus_error(error) from error
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return pause


def _first_error(answers: list[Any], keep_errors: bool) -> list[Any]:
    for answer in answers:
        if isinstance(answer, Exception) and (not keep_errors or trouble_of(answer) is not None):
            raise answer
    return answers


class Bus:
    """Blocking. Connections are pooled; one bus serves all threads of a process. Must not be used across a fork."""

    def __init__(self, url: str, *, timeout: float = TIMEOUT, patience: float = PATIENCE, max_connections: int = 16) -> None:
        self.url = url
        self.patience = patience
        self.timeout = timeout
        self._servers = Servers(url)
        self._client = self._connect(timeout, max_connections)
        self._blocking = self._connect(timeout + MAX_BLOCK, max_connections)

    def _connect(self, timeout: float, max_connections: int) -> Any:  # redis.Redis, whose methods are untyped
        pool = self._servers.pool(timeout, redis.BlockingConnectionPool, max_connections=max_connections, timeout=timeout)
        client = redis.Redis(connection_pool=pool)
        client.response_callbacks.clear()
        return client

    def run(self, call: Call[T]) -> T:
        """The call's result. Raises BusUnavailable, UnfitRedis, Fenced, and redis.ResponseError for a fault of the program."""
        while True:
            result = call.decode(self._answer(call))
            if not isinstance(result, Call):
                return result
            call = result

    def _answer(self, call: Call[Any]) -> Any:
        patience = _Patience(self.patience)
        while True:
            try:
                return self._send(call)
            except (RedisError, OSError) as error:
                self._leave(error)
                time.sleep(patience.pause(error))

    def _leave(self, error: Exception) -> None:
        """Connections that are idle now may lead to a server that is the master no more: the next ones begin anew."""
        if trouble_of(error) in _IS_ELSEWHERE | {Trouble.AWAY}:
            for client in (self._client, self._blocking):
                client.connection_pool.disconnect(inuse_connections=False)

    def _send(self, call: Call[Any]) -> Any:
        client = self._blocking if call.block else self._client
        if call.script is not None:
            try:
                return client.execute_command(*call.evalsha())
            except NoScriptError:
                return client.execute_command(*call.eval())
        if not call.commands:
            return []
        if len(call.commands) == 1 and not call.keep_errors:
            return [client.execute_command(*call.commands[0])]
        with client.pipeline(transaction=call.transaction) as pipeline:
            for command in call.commands:
                pipeline.execute_command(*command)
            return _first_error(pipeline.execute(raise_on_error=False), call.keep_errors)

    @contextmanager
    def subscribe(self, *channels: str) -> Iterator[Subscription]:
        """Listen to channels; returns once Redis has confirmed them."""
        subscription = Subscription(self._servers, channels, self.timeout)
        try:
            yield subscription
        finally:
            subscription.close()

    def close(self) -> None:
        for client in (self._client, self._blocking):
            client.close()
            client.connection_pool.disconnect()
        self._servers.close()

    def __enter__(self) -> Bus:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class AsyncBus:
    """The same for asyncio; belongs to one event loop. Scripts, which are short, share one connection; any other call has one of a
    pool to itself."""

    def __init__(self, url: str, *, timeout: float = TIMEOUT, patience: float = PATIENCE, max_connections: int = 64) -> None:
        self.url = url
        self.patience = patience
        self.timeout = timeout
        self._servers = AsyncServers(url)
        # No socket timeout: redis-py would send under asyncio.wait_for, which swallows a cancellation that comes as it completes
        # (cpython#86296, to Python 3.11) and costs a task a command. `_answer` has the timeout instead.
        options: dict[str, Any] = {"socket_timeout": None}
        bounded = {"max_connections": max_connections, "timeout": timeout, **options}
        pool = self._servers.pool(timeout, redis.asyncio.BlockingConnectionPool, **bounded)
        self._client: Any = redis.asyncio.Redis(connection_pool=pool)  # its methods are untyped
        self._client.response_callbacks.clear()
        self._line: Line | None = None
        # Makes the connections that become lines, and keeps none of them.
        self._line_pool: Any = self._servers.pool(timeout, **options)
        self._opening = asyncio.Lock()

    async def run(self, call: Call[T]) -> T:
        """As Bus.run."""
        while True:
            result = call.decode(await self._answer(call))
            if not isinstance(result, Call):
                return result
            call = result

    async def _answer(self, call: Call[Any]) -> Any:
        patience = _Patience(self.patience)
        while True:
            try:
                if call.script is not None:
                    return await self._run_script(call)
                async with asyncio.timeout(self.timeout + call.block):
                    return await self._send(call)
            except (RedisError, OSError) as error:
                await self._leave(error)
                await asyncio.sleep(patience.pause(error))

    async def _leave(self, error: Exception) -> None:
        """As Bus._leave."""
        trouble = trouble_of(error)
        if trouble in _IS_ELSEWHERE and self._line is not None:
            self._line.close()
        if trouble in _IS_ELSEWHERE | {Trouble.AWAY}:
            await self._client.connection_pool.disconnect(inuse_connections=False)

    async def _run_script(self, call: Call[Any]) -> Any:
        line = self._line
        if line is None or line.closed:
            line = await self._reopened_line()
        try:
            return await line.ask(call.evalsha())
        except NoScriptError:
            return await line.ask(call.eval())

    async def _reopened_line(self) -> Line:
        async with asyncio.timeout(self.timeout), self._opening:  # one opens it for all
            if self._line is None or self._line.closed:
                self._line = await open_line(self._line_pool, self.timeout)
            return self._line

    async def _send(self, call: Call[Any]) -> Any:
        client = self._client
        if not call.commands:
            return []
        if len(call.commands) == 1 and not call.keep_errors:
            return [await client.execute_command(*call.commands[0])]
        async with client.pipeline(transaction=call.transaction) as pipeline:
            for command in call.commands:
                pipeline.execute_command(*command)
            return _first_error(await pipeline.execute(raise_on_error=False), call.keep_errors)

    @asynccontextmanager
    async def subscribe(self, *channels: str) -> AsyncIterator[AsyncSubscription]:
        """As Bus.subscribe."""
        subscription = AsyncSubscription(self._servers, channels, self.timeout)
        await subscription.open()
        try:
            yield subscription
        finally:
            await subscription.close()

    async def close(self) -> None:
        if self._line is not None:
            self._line.close()
        await self._client.aclose()
        await self._client.connection_pool.disconnect()
        await self._servers.close()

    async def __aenter__(self) -> AsyncBus:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
