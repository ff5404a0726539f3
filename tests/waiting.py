"""Waits for what gives no sign when it happens. Every wait of the tests that has to look again and again is one of these two."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
What = str | Callable[[], str]

SECONDS = 20.0  # more than anything here takes on a busy machine; nothing waits as long when all is well
PAUSE = 0.01  # between two looks


def wait_for(look: Callable[[], T], what: What, seconds: float = SECONDS, pause: float = PAUSE) -> T:
    """The first true result of `look()`. The test fails when there is none within `seconds`, and its message names `what`."""
    deadline = time.monotonic() + seconds
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise _too_late(what, seconds, seen)
        time.sleep(pause)
    return seen


async def wait_for_async(look: Callable[[], T | Awaitable[T]], what: What, seconds: float = SECONDS, pause: float = PAUSE) -> T:
    """The same while the event loop goes on. `look` may be a coroutine function. A pause of 0 is one turn of the loop."""
    deadline = time.monotonic() + seconds
    while True:
        looked = look()
        seen: T = await looked if inspect.isawaitable(looked) else looked
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise _too_late(what, seconds, seen)
        await asyncio.sleep(pause)


def _too_late(what: What, seconds: float, seen: object) -> AssertionError:
    return AssertionError(f"not within {seconds} s: {what if isinstance(what, str) else what()} (last seen: {seen!r})")
