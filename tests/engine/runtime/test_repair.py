"""Streams with lost messages and cut subscriptions come whole nevertheless; over a real Redis with the null model."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from engine.bus.enqueue import AdmissionLimits
from engine.client.client import AsyncClient
from engine.protocol import (
    EngineCoreOutputs,
    FinishedOutput,
    FinishReason,
    OutputPromptLogprobs,
    RequestTimes,
    encode_column,
)
from tests.engine.conftest import RunningEngine
from tests.engine.following import Follower
from tests.engine.runtime.null_requests import add, add_long, expected, make_request, settled
from tests.waiting import wait_for_async


async def test_lost_messages_are_healed(engine: RunningEngine, client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third message is lost on the way, the last one too."""
    taken = client._listener._take_payload
    count = 0

    def lossy(payload: bytes) -> None:
        nonlocal count
        count += 1
        if count % 3:
            taken(payload)

    monkeypatch.setattr(client._listener, "_take_payload", lossy)
    requests = [make_request(client, max_tokens=60) for _ in range(5)]
    streams = [(await add(client, request))[0] for request in requests]
    async with asyncio.timeout(30):
        results = await asyncio.gather(*map(Follower.whole, streams))
    for request, (tokens, _) in zip(requests, results, strict=True):
        assert tokens == [expected(request)]
    await settled(engine)


async def test_an_unreadable_message_is_repaired_like_a_lost_one(
    engine: RunningEngine, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = client._listener._take_payload
    messages = iter(range(100))
    monkeypatch.setattr(client._listener, "_take_payload", lambda payload: taken(payload if next(messages) else payload[:-1]))
    request = make_request(client)
    (stream,) = await add(client, request)
    async with asyncio.timeout(30):
        tokens, _ = await stream.whole()
    assert tokens == [expected(request)]
    await settled(engine)


async def test_a_cut_subscription_is_healed(slow_engine: RunningEngine, client: AsyncClient) -> None:
    stream = await add_long(client)
    connections = slow_engine.bus._client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    assert connections >= 1
    async with asyncio.timeout(30):
        await stream.has_tokens(stream.num_tokens + 1)
        stream.abort()
    await settled(slow_engine)


async def test_a_request_on_its_way_is_not_given_up_after_a_cut(engine: RunningEngine, client: AsyncClient) -> None:
    """Redis holds `enqueue` back; meanwhile the subscription breaks, and its healing finds no record of the request."""
    redis = engine.bus._client.execute_command
    request = make_request(client)
    redis("CLIENT", "PAUSE", 10_000, "WRITE")
    adding = asyncio.create_task(add(client, request))
    async with asyncio.timeout(30):
        await wait_for_async(lambda: client.num_streams, "the stream", pause=0)
        (stream,) = client._streams.values()
        redis("CLIENT", "KILL", "TYPE", "pubsub")
        await client._repairs.repair([stream])
        redis("CLIENT", "UNPAUSE")
        (follower,) = await adding
        assert follower.stream is stream
        tokens, _ = await follower.whole()
    assert tokens == [expected(request)]
    await settled(engine)


async def test_a_gap_in_a_stream_that_the_same_message_ends_is_ignored(engine: RunningEngine, client: AsyncClient) -> None:
    """Prompt logprobs are missing, and before they can be asked for the engine ends the request with an error."""
    request = make_request(client, prompt=40, prompt_logprobs=0)
    (stream,) = await add(client, request, model="nobody", limits=AdmissionLimits(require_engine=False))
    late = OutputPromptLogprobs(request.handle, 20, encode_column([7]), encode_column([0.0], np.float32), encode_column([1]))
    end = FinishedOutput(request.handle, 0, 0, FinishReason.ERROR, None, 0, RequestTimes(), "broken")
    client._listener.take(EngineCoreOutputs("nobody:0", 1, 1, prompt_logprobs=[late], finished=[end]))
    _, ends = await stream.whole()
    assert ends == [end] and client.num_streams == 0
