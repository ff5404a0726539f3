"""Several engines share one queue, over a real Redis with the null model: how many requests each takes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec
import pytest

from engine.bus import keys
from engine.bus.call import Call
from engine.bus.connection import Bus
from engine.bus.subscription import Subscription
from engine.client.client import AsyncClient
from engine.protocol import FinishReason
from engine.runtime.intake import Intake
from tests.engine.conftest import MODEL, RunningEngine
from tests.engine.runtime.null_requests import add, expected, make_request, settled
from tests.waiting import wait_for


@pytest.fixture(autouse=True)
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take so long that no request ends before all have been taken."""
    monkeypatch.setenv("HEADRACE_NULL_RUNNER", "step_seconds=0.02")


def look_again(*engines: RunningEngine) -> None:
    """Until each of them has asked for requests after this call, and so has a share."""
    began = {engine: _last_asked(engine) for engine in engines}
    for engine in engines:
        wait_for(lambda engine=engine: _last_asked(engine) > began[engine], "a look")  # type: ignore[misc]


def _last_asked(engine: RunningEngine) -> float:
    score = Call(lambda answers: float(answers[0] or 0), commands=(("ZSCORE", keys.asked(MODEL), engine.info.slot),))
    return engine.bus.run(score)


async def run(client: AsyncClient, count: int, max_tokens: int = 100, prompt: int = 20) -> Counter[str]:
    """Run requests at once, to their ends. Returns slot -> how many of them ran there."""
    alike = [make_request(client, prompt=prompt, max_tokens=max_tokens) for _ in range(count)]
    requests = [msgspec.structs.replace(each, cache_salt=each.request_id) for each in alike]  # no two share blocks
    followers = [follower for request in requests for follower in await add(client, request)]
    for request, (tokens, (end,)) in zip(
        requests, await asyncio.gather(*(follower.whole() for follower in followers)), strict=True
    ):
        assert tokens == [expected(request, prompt=prompt)] and end.reason == FinishReason.LENGTH
    records = await asyncio.gather(*(client.record(MODEL, request.request_id) for request in requests))
    return Counter(record.engine for record in records if record is not None)


async def test_two_engines_get_equal_numbers(start_engine: Callable[..., RunningEngine], client: AsyncClient) -> None:
    engines = [start_engine(), start_engine()]
    look_again(*engines)
    shares = await run(client, 16)
    assert sorted(shares) == ["0", "1"] and 7 <= shares["0"] <= 9, shares
    for engine in engines:
        await settled(engine)


async def test_single_requests_are_taken_though_two_engines_ask(
    start_engine: Callable[..., RunningEngine], client: AsyncClient
) -> None:
    start_engine(), start_engine()
    for _ in range(6):
        assert (await run(client, 1, max_tokens=2)).total() == 1


async def test_engines_of_different_size_take_all_requests(start_engine: Callable[..., RunningEngine], client: AsyncClient) -> None:
    start_engine(max_num_seqs=2)
    start_engine(max_num_seqs=32)
    async with asyncio.timeout(20):
        shares = await run(client, 24)
    assert shares["0"] + shares["1"] == 24 and shares["1"] >= 16, shares


async def test_an_engine_short_of_kv_cache_holds_no_request_back(
    start_engine: Callable[..., RunningEngine], client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine's cache takes four prompts and a part of the fifth. Four more wait in its line before it knows. It has rows for
    all, but the other requests go to the engine with blocks."""
    monkeypatch.setattr("engine.bus.transitions.SHARE_TTL", 60.0)
    start_engine(max_num_seqs=64, num_blocks=33)
    start_engine(max_num_seqs=64)
    async with asyncio.timeout(20):
        shares = await run(client, 24, max_tokens=50, prompt=100)
    assert shares["0"] + shares["1"] == 24 and shares["1"] >= 15, shares


async def test_a_sleeping_engine_holds_no_request_back(start_engine: Callable[..., RunningEngine], client: AsyncClient) -> None:
    engines = [start_engine(), start_engine()]
    look_again(*engines)
    await run(client, 2, max_tokens=2)
    await client.directory.refresh()
    sleeper = client.directory.engines[1]
    assert (await client.utility(sleeper, "sleep")).ok
    async with asyncio.timeout(20):
        await run(client, 16)  # a look that had begun may take some
        assert (await run(client, 16))["0"] == 16
    assert (await client.utility(sleeper, "wake_up")).ok
    look_again(*engines)
    shares = await run(client, 16)
    assert 7 <= shares["1"] <= 9, shares


async def test_a_burst_is_taken_as_fast_as_steps_find_places(
    start_engine: Callable[..., RunningEngine], client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look is not waited for where a step has made room."""
    monkeypatch.setattr("engine.runtime.intake.LOOK_SECONDS", 30.0)
    start_engine()
    async with asyncio.timeout(20):
        assert await run(client, 16, max_tokens=40) == {"0": 16}


async def test_a_request_that_arrives_before_the_engine_listens_is_not_left_until_the_next_look(
    start_engine: Callable[..., RunningEngine], client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.runtime.intake.LOOK_SECONDS", 30.0)
    looked, arrived = threading.Event(), threading.Event()
    take_once, subscribe = Intake._take_once, Bus.subscribe

    def look(intake: Intake) -> bool:
        found = take_once(intake)
        looked.set()
        return found

    def listen(bus: Bus, *channels: str) -> AbstractContextManager[Subscription]:
        if keys.wake_channel(MODEL, "0") in channels:
            assert arrived.wait(20)
        return subscribe(bus, *channels)

    monkeypatch.setattr(Intake, "_take_once", look)
    monkeypatch.setattr(Bus, "subscribe", listen)
    start_engine()
    assert await asyncio.to_thread(looked.wait, 20)
    request = make_request(client)
    (follower,) = await add(client, request)
    arrived.set()
    async with asyncio.timeout(10):
        await follower.whole()
