"""An engine dies in mid-stream and another one continues its requests, over a real Redis with the null model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.client.client import AsyncClient
from engine.protocol import FinishReason, decode_column
from engine.runtime.owned_requests import GOES_WELL_TOKENS
from tests.engine.conftest import MODEL, RunningEngine
from tests.engine.runtime.null_requests import add, expected, make_request, settled
from tests.waiting import wait_for_async


async def test_streams_go_on_at_the_next_engine(
    slow_engine: RunningEngine, start_engine: Callable[..., RunningEngine], client: AsyncClient
) -> None:
    """Two choices, logprobs and prompt logprobs, running requests and waiting ones, one of them with a stop string."""
    requests = [make_request(client, n=2, max_tokens=40, logprobs=1, prompt_logprobs=0) for _ in range(12)]
    streams = [(await add(client, request, stop={0: 25} if request is requests[0] else None))[0] for request in requests]
    async with asyncio.timeout(30):
        await streams[0].has_tokens(20)
        slow_engine.loop.fail(RuntimeError("the test ends this engine"))
        slow_engine.join()
        second = start_engine()
        results = await asyncio.gather(*(stream.whole(2) for stream in streams))
    for request, stream, (tokens, ends) in zip(requests, streams, results, strict=True):
        count = 25 if request is requests[0] else 40
        assert tokens == [expected(request, 0)[:count], expected(request, 1)]
        assert [(end.reason, end.num_tokens) for end in ends] == [
            (FinishReason.STOP if count == 25 else FinishReason.LENGTH, count),
            (FinishReason.LENGTH, 40),
        ]
        offsets = sorted((entry.choice, entry.offset) for entry in stream.logprobs)
        assert offsets == [(0, offset) for offset in range(count)] + [(1, offset) for offset in range(40)]
        assert (stream.prompt_logprobs[0].position, stream.prompt_logprobs[-1].end) == (1, 20)
    await settled(second)
    assert second.core.stats().generation_tokens < 12 * 80, "the second engine made all tokens again"
    record = await client.record(MODEL, requests[1].request_id)
    assert record is not None and (record.state, record.output_tokens) == ("ended", 80)
    assert len(decode_column(requests[1].prompt_token_ids)) == record.prompt_tokens


async def test_a_request_that_goes_on_well_is_not_blamed_for_the_death_before(
    slow_engine: RunningEngine, start_engine: Callable[..., RunningEngine], client: AsyncClient
) -> None:
    """Long before its journal is full: the next death may come at any time."""
    request = make_request(client, max_tokens=400)
    (stream,) = await add(client, request)
    await stream.has_tokens(10)
    slow_engine.loop.fail(RuntimeError("the test ends this engine"))
    slow_engine.join()
    record = await client.record(MODEL, request.request_id)
    assert record is not None and record.attempts == 1
    second = start_engine()
    await stream.has_tokens(stream.num_tokens + GOES_WELL_TOKENS + 8)

    async def is_cleared() -> bool:
        record = await client.record(MODEL, request.request_id)
        return record is not None and (record.state, record.attempts) == ("running", 0)

    await wait_for_async(is_cleared, "a record without the death", seconds=2.0)
    stream.abort()
    await settled(second)
