"""The engine as its clients meet it: outputs, records, order, refusals, utility calls; over a real Redis with the null model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine.bus import records
from engine.bus.call import Call
from engine.bus.enqueue import AdmissionLimits, Refused
from engine.client.client import AsyncClient
from engine.protocol import (
    FinishReason,
)
from engine.runtime.slot_owner import SlotOwner
from engine.scheduling.request import Request
from engine.scheduling.scheduler import LOOKAHEAD
from tests.engine.conftest import MODEL, RunningEngine
from tests.engine.following import Follower
from tests.engine.runtime.null_requests import add, add_long, expected, make_request, settled
from tests.waiting import wait_for_async


async def test_outputs_come_whole_and_end_once(engine: RunningEngine, client: AsyncClient) -> None:
    requests = [make_request(client) for _ in range(40)]  # more than run at once
    streams = [(await add(client, request))[0] for request in requests]
    for request, (tokens, ends) in zip(requests, await asyncio.gather(*map(Follower.whole, streams)), strict=True):
        assert tokens == [expected(request)]
        assert ends[0].reason == FinishReason.LENGTH
        times = ends[0].times
        assert 0 < times.received <= times.scheduled <= times.first_token <= times.last_token <= times.finished
    await settled(engine)
    record = await client.record(MODEL, requests[0].request_id)
    assert record is not None
    assert (record.state, record.reason, record.output_tokens, record.prompt_tokens) == ("ended", "length", 10, 20)


async def test_choices_differ_and_each_ends(engine: RunningEngine, client: AsyncClient) -> None:
    request = make_request(client, n=3)
    (stream,) = await add(client, request)
    tokens, ends = await stream.whole(3)
    assert tokens == [expected(request, choice) for choice in range(3)]
    assert [end.reason for end in ends] == [FinishReason.LENGTH] * 3
    await settled(engine)


async def test_logprobs_and_prompt_logprobs_come_complete(engine: RunningEngine, client: AsyncClient) -> None:
    request = make_request(client, prompt=300, logprobs=2, prompt_logprobs=1)  # longer than a step's budget
    (stream,) = await add(client, request)
    await stream.whole()
    assert all(len(entry.token_ids) == 12 for entry in stream.logprobs)
    assert [entry.offset for entry in stream.logprobs] == list(range(10))
    parts = [range(part.position, part.position + len(part.ranks) // 4) for part in stream.prompt_logprobs]
    assert list(itertools.chain(*parts)) == list(range(1, 300))
    await settled(engine)


async def test_a_running_record_tells_what_the_prefix_cache_gave(slow_engine: RunningEngine, client: AsyncClient) -> None:
    (first,) = await add(client, make_request(client, prompt=40))
    await first.whole()
    stream = await add_long(client, prompt=40)
    record = await client.record(MODEL, stream.request_id)
    assert record is not None and (record.state, record.cached_tokens) == ("running", 32)  # whole blocks
    stream.abort()
    await settled(slow_engine)


async def test_a_row_that_fails_ends_alone_though_the_next_step_is_planned(
    start_engine: Callable[..., RunningEngine], client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_NULL_RUNNER", "step_seconds=0.002,fail_seed=77")
    engine = start_engine()
    good = make_request(client, max_tokens=100)
    (stream,) = await add(client, good)
    await stream.has_tokens()
    bad = [(await add(client, make_request(client, seed=77)))[0] for _ in range(3)]
    for tokens, ends in await asyncio.gather(*map(Follower.whole, bad)):
        assert (tokens, ends[0].reason) == ([[]], FinishReason.ERROR)
        assert ends[0].error is not None and "seed 77 fails" in ends[0].error
    tokens, _ = await stream.whole()
    assert tokens[0] == expected(good)[100 - len(tokens[0]) :]
    await settled(engine)
    assert engine.error is None


async def test_live_records_count_the_tokens_of_running_requests(slow_engine: RunningEngine, client: AsyncClient) -> None:
    stream = await add_long(client)
    seen = await wait_for_async(lambda: slow_engine.bus.run(records.live_requests(MODEL))[0].output_tokens, "progress in the list")
    assert 0 < seen <= 450
    assert slow_engine.bus.run(records.find(MODEL, "mine"))[0].output_tokens >= seen
    stream.abort()
    await settled(slow_engine)


async def test_a_prompt_that_does_not_fit_ends_with_an_error(engine: RunningEngine, client: AsyncClient) -> None:
    (stream,) = await add(client, make_request(client, prompt=600))
    _, ends = await stream.whole()
    assert ends[0].reason == FinishReason.ERROR and "600 tokens" in (ends[0].error or "")
    await settled(engine)


async def test_a_request_taken_twice_runs_once(engine: RunningEngine, client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = engine.loop.owner

    def run(call: Call[Any]) -> Any:
        answer = SlotOwner.run(owner, call)
        return [*answer, *answer] if call.script is not None and call.script.name == "take" else answer

    monkeypatch.setattr(owner, "run", run)
    request = make_request(client)
    (stream,) = await add(client, request)
    tokens, ends = await stream.whole()
    assert tokens == [expected(request)] and ends[0].reason is FinishReason.LENGTH
    await settled(engine)


async def test_a_request_on_its_way_to_the_scheduler_keeps_its_place(
    engine: RunningEngine, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The intake looks for room on a thread of its own, also while the loop admits a request."""
    add_request, rooms = engine.core.add_request, []

    def look_and_add(request: Request) -> None:
        rooms.append(engine.loop.intake._room()[0])
        add_request(request)

    monkeypatch.setattr(engine.core, "add_request", look_and_add)
    (stream,) = await add(client, make_request(client))
    await stream.whole()
    assert rooms == [LOOKAHEAD - 1]
    await settled(engine)


async def test_limits_refuse_the_whole_list(engine: RunningEngine, client: AsyncClient) -> None:
    with pytest.raises(Refused) as refusal:
        await add(client, *(make_request(client) for _ in range(3)), limits=AdmissionLimits(max_num_queued_reqs=2))
    assert refusal.value.reason == "max_num_queued_reqs"
    assert client.num_streams == 0
    await settled(engine)


async def test_cancelling_add_at_any_await_leaves_nothing(engine: RunningEngine, client: AsyncClient) -> None:
    for delay in range(12):
        task = asyncio.create_task(add(client, make_request(client, max_tokens=450)))
        for _ in range(delay):
            await asyncio.sleep(0)
        task.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(outcome, list):
            outcome[0].abort()
    await settled(engine)
    assert client.num_streams == 0


async def test_waiting_requests_run_by_priority(start_engine: Callable[..., RunningEngine], client: AsyncClient) -> None:
    waiting = AdmissionLimits(require_engine=False)
    order: list[int] = []

    async def run(priority: int) -> None:
        request = msgspec.structs.replace(make_request(client, max_tokens=40), priority=priority)
        (stream,) = await add(client, request, limits=waiting)
        await stream.whole()
        order.append(priority)

    tasks = [asyncio.create_task(run(priority)) for priority in (5, 1, 3)]

    async def all_wait() -> bool:
        return len(await client._bus.run(records.live_requests(MODEL))) == 3

    await wait_for_async(all_wait, "three requests in the queue")
    engine = start_engine(max_num_seqs=1)
    await asyncio.gather(*tasks)
    assert order == [1, 3, 5]
    await settled(engine)


async def test_utility_calls(engine: RunningEngine, client: AsyncClient) -> None:
    await client.directory.refresh()
    (info,) = client.directory.engines
    assert (await client.utility(info, "reset_prefix_cache")).value is True
    assert (await client.utility(info, "no_such_call")).error == "There is no utility call 'no_such_call'."
    assert (await client.utility(info, "start_profile")).ok
    assert not (await client.utility(info, "start_profile")).ok
    assert str((await client.utility(info, "stop_profile")).value).endswith(".pstats")
    wrong = await client.utility(info, "sleep", "now")
    assert not wrong.ok and "TypeError" in (wrong.error or "")
    assert (await client.utility(info, "sleep")).ok
    (stream,) = await add(client, make_request(client))
    record = await client.record(MODEL, stream.request_id)
    assert record is not None and record.state == "queued"
    assert (await client.utility(info, "wake_up")).ok
    tokens, _ = await stream.whole()
    assert len(tokens[0]) == 10
    await settled(engine)
