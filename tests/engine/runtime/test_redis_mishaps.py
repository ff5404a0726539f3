"""Redis is wiped, comes back with less, hangs, or cuts its clients off; an engine is gone without a word: streams go on, each token
once. Over a real Redis with the null model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from engine.bus import keys, leases
from engine.client.client import AsyncClient
from engine.protocol import EngineCoreRequest
from engine.runtime.loop import EngineLoop
from tests.engine.bus.ledger_world import World
from tests.engine.conftest import MODEL, RunningEngine
from tests.engine.following import Follower
from tests.engine.runtime.null_requests import add, expected, make_request, settled

pytestmark = pytest.mark.parametrize("start_engine", ["mp"], indirect=True)

TOKENS = 50
RUNNING, WAITING = 12, 18  # 16 choices run at once; others wait in the engine, and in Redis


@pytest.fixture
def world(redis_url: str) -> Iterator[World]:
    with World(redis_url, MODEL) as world:
        yield world


class Streams:
    """Requests in mid-stream, with one and with two choices, some with logprobs."""

    def __init__(self, requests: list[EngineCoreRequest], followers: list[Follower]) -> None:
        self.requests, self.followers = requests, followers

    @classmethod
    async def begin(cls, client: AsyncClient, count: int) -> Streams:
        kinds: list[dict[str, object]] = [{}, {"n": 2}, {"logprobs": 1}]
        requests = [make_request(client, max_tokens=TOKENS, **kinds[number % 3]) for number in range(count)]
        streams = cls(requests, await add(client, *requests))
        await streams.followers[0].has_tokens(10)
        return streams

    async def come_whole(self) -> None:
        async with asyncio.timeout(30):
            results = await asyncio.gather(
                *(each.whole(request.sampling.n) for request, each in zip(self.requests, self.followers, strict=True))
            )
        for request, follower, (tokens, _) in zip(self.requests, self.followers, results, strict=True):
            assert tokens == [expected(request, choice) for choice in range(request.sampling.n)]
            if request.sampling.logprobs is not None:
                assert [entry.offset for entry in follower.logprobs] == list(range(TOKENS))


def died_of_nothing(world: World, engine: RunningEngine) -> None:
    """The same engine ended all of them."""
    assert engine.error is None
    assert world.raw.get(keys.owner(MODEL, engine.info.slot)) == str(engine.info.incarnation).encode()
    for record in world.records().values():
        assert (record["state"], record["incarnation"]) == ("ended", str(engine.info.incarnation))
        assert "deaths" not in record


async def test_an_engine_that_is_gone_without_a_word_is_missed_and_another_goes_on(
    slow_engine: RunningEngine,
    start_engine: Callable[..., RunningEngine],
    client: AsyncClient,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody but the API server notices: the heartbeat stops."""
    streams = await Streams.begin(client, RUNNING)
    heir = start_engine()
    monkeypatch.setattr(EngineLoop, "_hand_over", lambda loop, blame: vanish(loop))
    slow_engine.loop.fail(RuntimeError("the test ends this engine"))
    await asyncio.to_thread(slow_engine.join)
    monkeypatch.undo()
    await streams.come_whole()
    assert {record.get("deaths", "0") for record in world.records().values()} <= {"0", "1"}
    await settled(heir)


def vanish(loop: EngineLoop) -> None:
    """As a killed process: nothing more is flushed, and nothing is given back."""
    loop.heartbeat.stop()
    loop.intake.stop()
    loop.intake.join(5.0)
    loop.publisher.close(0.0)


async def test_a_wipe_in_mid_stream(slow_engine: RunningEngine, client: AsyncClient, world: World) -> None:
    """The engine puts back what runs, the API server what waited in Redis."""
    streams = await Streams.begin(client, RUNNING + WAITING)
    world.raw.flushall()
    await streams.come_whole()
    await settled(slow_engine)
    died_of_nothing(world, slow_engine)


async def test_a_redis_that_comes_back_with_less(slow_engine: RunningEngine, client: AsyncClient, world: World) -> None:
    """Ends, outputs and takes since then are lost, as with an append-only file that is written every second."""
    short = make_request(client, max_tokens=15)
    streams = await Streams.begin(client, RUNNING - 1)
    (ended,) = await add(client, short)
    await ended.has_tokens(5)
    saved = world.save()
    await ended.whole()
    later = await add(client, one_more := make_request(client, max_tokens=TOKENS))
    await later[0].has_tokens()
    world.restore(saved)
    await streams.come_whole()
    assert (await later[0].whole())[0] == [expected(one_more)]
    await settled(slow_engine)
    died_of_nothing(world, slow_engine)
    assert world.record(short.request_id).reason == "length"


async def test_cut_connections(slow_engine: RunningEngine, client: AsyncClient, world: World) -> None:
    streams = await Streams.begin(client, RUNNING)
    for kind in ("pubsub", "normal"):
        assert world.raw.client_kill_filter(_type=kind, skipme=True) >= 2
    await streams.come_whole()
    await settled(slow_engine)
    died_of_nothing(world, slow_engine)


async def test_a_redis_that_hangs_for_longer_than_a_slot_lives(
    slow_engine: RunningEngine, client: AsyncClient, world: World
) -> None:
    streams = await Streams.begin(client, RUNNING)
    world.raw.client_pause(int(1000 * (leases.SLOT_TTL + 1.0)))
    await streams.come_whole()
    await settled(slow_engine)
    died_of_nothing(world, slow_engine)
