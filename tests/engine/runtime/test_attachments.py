"""Streams taken up by another client: over a real Redis, with a real engine loop and the null model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import redis
from msgspec.structs import replace

from engine.bus import records
from engine.bus.call import Call
from engine.bus.connection import AsyncBus
from engine.bus.enqueue import AdmissionLimits
from engine.client.client import TAKEN_UP_ELSEWHERE, AsyncClient
from engine.protocol import Attach, EngineCoreRequest, FinishReason, RequestFacts, StoredOutput
from tests.engine.conftest import MODEL, RunningEngine
from tests.engine.following import Follower
from tests.engine.runtime.null_requests import NO_LIMITS, expected, make_request, settled
from tests.waiting import wait_for_async


@pytest.fixture
async def other(redis_url: str) -> AsyncIterator[AsyncClient]:
    """A second API server's client."""
    async with AsyncBus(redis_url) as bus:
        client = AsyncClient(bus)
        await client.start()
        yield client
        await client.close()


async def add(client: AsyncClient, request: EngineCoreRequest, **facts: object) -> Follower:
    follower = Follower()
    facts_of = RequestFacts(**facts)  # type: ignore[arg-type]
    (follower.stream,) = await client.add(MODEL, [replace(request, facts=facts_of)], [follower], NO_LIMITS)
    return follower


async def attach(client: AsyncClient, request: EngineCoreRequest) -> Follower:
    follower = Follower()
    own = replace(request, client=client.incarnation, handle=client.next_handle())
    (follower.stream,) = await client.attach(MODEL, [own], [follower])
    return follower


async def test_a_stream_taken_up_in_mid_stream_comes_whole(
    slow_engine: RunningEngine, client: AsyncClient, other: AsyncClient
) -> None:
    request = make_request(client, max_tokens=60, n=2, logprobs=1, prompt_logprobs=1)
    first = await add(client, request)
    await first.has_tokens(10)
    second = await attach(other, request)
    async with asyncio.timeout(30):
        tokens, ends = await second.whole(2)
        _, lost = await first.whole(2)
    assert tokens == [expected(request, choice) for choice in range(2)]
    assert len(second.logprobs) == 120 and second.prompt_logprobs
    assert [end.error for end in lost] == [TAKEN_UP_ELSEWHERE] * 2
    assert {end.reason for end in ends} == {FinishReason.LENGTH}
    await settled(slow_engine)


async def test_a_command_to_attach_may_overtake_its_request(engine: RunningEngine, client: AsyncClient, other: AsyncClient) -> None:
    request = make_request(client, max_tokens=30)
    handle = other.next_handle()
    engine.loop.inbox.put(Attach(request.request_id, other.incarnation, handle))
    first = await add(client, request)
    async with asyncio.timeout(30):
        await first.whole()  # by its probe: the engine publishes to the other one
    await settled(engine)


async def test_an_ended_request_is_read_from_its_record(engine: RunningEngine, client: AsyncClient, other: AsyncClient) -> None:
    request = make_request(client, max_tokens=30)
    first = await add(client, request)
    async with asyncio.timeout(30):
        await first.whole()
        tokens, _ = await (await attach(other, request)).whole()
    assert tokens == [expected(request)]


async def test_a_request_outlives_its_stream_for_its_grace_time(slow_engine: RunningEngine, client: AsyncClient) -> None:
    patient, short = make_request(client, max_tokens=40), make_request(client, max_tokens=450)
    streams = [await add(client, patient, grace=30.0), await add(client, short, grace=0.3)]
    for stream in streams:
        await stream.has_tokens()
        stream.abort()

    async def ended() -> bool:
        found = [await client.record(MODEL, request.request_id) for request in (patient, short)]
        return all(record is not None and record.state == "ended" for record in found)

    await wait_for_async(ended, "the ends of both")
    reasons = [(await client.record(MODEL, each.request_id)).reason for each in (patient, short)]  # type: ignore[union-attr]
    assert reasons == ["length", "abort"]


async def test_a_follower_waits_for_a_request_that_redis_forgot_until_it_is_put_back(
    slow_engine: RunningEngine, client: AsyncClient, other: AsyncClient
) -> None:
    request = replace(make_request(client, max_tokens=200), facts=RequestFacts(grace=30.0, idempotency_key="k", body_hash="b"))
    first, follower = Follower(), Follower()
    (first.stream,) = await client.add(MODEL, [request], [first], NO_LIMITS)
    own = replace(request, client=other.incarnation, handle=other.next_handle())
    (follower.stream,) = other.follow(MODEL, [own], [follower])
    await first.has_tokens(10)
    with redis.Redis.from_url(slow_engine.bus.url) as raw:
        raw.flushall()
    async with asyncio.timeout(60):
        assert (await first.whole())[0] == (await follower.whole())[0] == [expected(request)]


async def test_a_queued_request_that_another_client_took_up_outlives_a_wipe(
    start_engine: Callable[..., RunningEngine], client: AsyncClient, other: AsyncClient, redis_url: str
) -> None:
    request = make_request(client, max_tokens=20)
    first = Follower()
    limits = AdmissionLimits(require_engine=False)
    (first.stream,) = await client.add(MODEL, [request], [first], limits)
    second = await attach(other, replace(request, prompt_token_ids=bytes(len(request.prompt_token_ids))))
    with redis.Redis.from_url(redis_url) as raw:
        raw.flushall()
    start_engine()
    async with asyncio.timeout(60):
        assert (await second.whole())[0] == [expected(request)]


async def test_followers_get_the_stored_answer_and_one_takes_up_what_nobody_listens_to(
    slow_engine: RunningEngine, client: AsyncClient, other: AsyncClient
) -> None:
    request = replace(make_request(client, max_tokens=80), facts=RequestFacts(grace=30.0, idempotency_key="k", body_hash="b"))
    first = Follower()
    (first.stream,) = await client.add(MODEL, [request], [first], NO_LIMITS)
    followers = [Follower() for _ in range(3)]
    for follower in followers:
        own = replace(request, client=other.incarnation, handle=other.next_handle())
        (follower.stream,) = other.follow(MODEL, [own], [follower])
    await first.has_tokens()
    first.abort()

    async def taken_up() -> bool:
        record = await client.record(MODEL, request.request_id)
        return record is not None and record.client == other.incarnation

    await wait_for_async(taken_up, "a follower that listens")
    async with asyncio.timeout(30):
        for follower in followers:
            assert (await follower.whole())[0] == [expected(request)]
    assert await other._bus.run(records.stored_output(MODEL, request.request_id)) is not None


@pytest.mark.parametrize("start_engine", ["mp"], indirect=True)
async def test_an_end_that_redis_has_forgotten_since_the_look_is_no_end(
    engine: RunningEngine, client: AsyncClient, other: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback between the look that finds the request ended and the one that reads its output."""
    request = replace(make_request(client, max_tokens=30), facts=RequestFacts(grace=30.0, idempotency_key="k", body_hash="b"))
    first = Follower()
    (first.stream,) = await client.add(MODEL, [request], [first], NO_LIMITS)
    await first.whole()
    real, forgotten = records.stored_output, []

    def forgetful(model: str, request_id: str) -> Call[StoredOutput | None]:
        if len(forgotten) < 2:
            forgotten.append(request_id)
            return Call(lambda _: None)
        return real(model, request_id)

    monkeypatch.setattr(records, "stored_output", forgetful)
    follower = Follower()
    (follower.stream,) = other.follow(MODEL, [replace(request, client=other.incarnation, handle=other.next_handle())], [follower])
    taken_up = await attach(other, request)
    async with asyncio.timeout(30):
        for stream in (follower, taken_up):
            assert (await stream.whole())[0] == [expected(request)]
    assert len(forgotten) == 2
