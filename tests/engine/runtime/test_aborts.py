"""Aborts, and ends that the client finds in the text; over a real Redis with the null model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from engine.bus import control, keys
from engine.bus.call import Call
from engine.bus.enqueue import AdmissionLimits, Refused
from engine.client.client import AsyncClient
from engine.protocol import (
    Abort,
    FinishReason,
)
from tests.engine.conftest import MODEL, RunningEngine
from tests.engine.runtime.null_requests import add, add_long, make_request, settled
from tests.waiting import wait_for_async


async def test_abort_of_a_running_request_frees_its_blocks(slow_engine: RunningEngine, client: AsyncClient) -> None:
    stream = await add_long(client)
    result = await client.abort(MODEL, stream.request_id)
    assert result.found and result.state == "ended" and 0 < result.num_tokens < 450
    assert slow_engine.core.stats().num_free_blocks == slow_engine.core.limits.num_blocks - 1
    _, ends = await stream.whole()
    assert (ends[0].reason, ends[0].num_tokens) == (FinishReason.ABORT, result.num_tokens)
    again = await client.abort(MODEL, stream.request_id)
    assert again.found and again.num_tokens == result.num_tokens
    await settled(slow_engine)


async def test_a_client_that_leaves_frees_the_engine(engine: RunningEngine, client: AsyncClient) -> None:
    streams = [(await add(client, make_request(client, max_tokens=450)))[0] for _ in range(30)]  # running and waiting ones
    await streams[0].has_tokens()
    for stream in streams:
        stream.abort()
    await settled(engine)
    assert client.num_streams == 0


async def test_commands_are_read_when_one_came_and_not_for_each_request(
    start_engine: Callable[..., RunningEngine], client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_NULL_RUNNER", "step_seconds=0.02")
    monkeypatch.setattr("engine.runtime.intake.COMMANDS_SECONDS", 60.0)
    reads: list[str] = []
    read_control = control.read_control

    def count(model: str, slot: str, incarnation: int, last_id: str) -> Call[control.ControlBatch]:
        reads.append(last_id)
        return read_control(model, slot, incarnation, last_id)

    monkeypatch.setattr(control, "read_control", count)
    start_engine()
    for _ in range(3):
        (stream,) = await add(client, make_request(client, max_tokens=2))
        await stream.whole()
    long = await add_long(client)
    assert len(reads) == 1, "when the engine began to listen"
    async with asyncio.timeout(20):
        assert (await client.abort(MODEL, long.request_id)).state == "ended"
    assert len(reads) == 2


async def test_abort_of_a_queued_request_needs_no_engine(start_engine: Callable[..., RunningEngine], client: AsyncClient) -> None:
    request = make_request(client)
    (stream,) = await add(client, request, limits=AdmissionLimits(require_engine=False))
    result = await client.abort(MODEL, request.request_id)
    assert (result.state, result.num_tokens) == ("ended", 0)
    _, ends = await stream.whole()
    assert ends[0].reason == FinishReason.ABORT
    await settled(start_engine())


async def test_an_abort_that_overtakes_its_request_wins(engine: RunningEngine, client: AsyncClient) -> None:
    request = make_request(client)
    assert not (await client.abort(MODEL, request.request_id)).found
    with pytest.raises(Refused) as refusal:
        await add(client, request)
    assert refusal.value.reason == "aborted"
    await settled(engine)


async def test_an_abort_read_before_its_request_wins(engine: RunningEngine, client: AsyncClient) -> None:
    """The engine reads commands and requests from different keys: the command may be first."""
    request = make_request(client, max_tokens=450)
    engine.loop.inbox.put(Abort(request.request_id))
    (stream,) = await add(client, request)
    tokens, ends = await stream.whole()
    assert (tokens, ends[0].reason) == ([[]], FinishReason.ABORT)
    await settled(engine)


async def test_a_stop_string_cuts_the_output(engine: RunningEngine, client: AsyncClient) -> None:
    request = make_request(client, max_tokens=450)
    (stream,) = await add(client, request, stop={0: 5})
    tokens, ends = await stream.whole()
    assert len(tokens[0]) == 5
    assert (ends[0].reason, ends[0].num_tokens, ends[0].stop_reason) == (FinishReason.STOP, 5, "END")
    await settled(engine)
    record = await client.record(MODEL, request.request_id)
    assert record is not None and (record.reason, record.output_tokens) == ("stop", 5)


async def test_an_abort_that_a_dead_engine_did_not_obey_is_obeyed_by_the_next(
    slow_engine: RunningEngine,
    start_engine: Callable[..., RunningEngine],
    client: AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slow_engine.loop, "_obey", lambda command, report: None)
    stream = await add_long(client)
    aborting = asyncio.create_task(client.abort(MODEL, stream.request_id, timeout=60))
    control = keys.control(MODEL, slow_engine.info.slot)
    await wait_for_async(lambda: slow_engine.bus._client.execute_command("XLEN", control), "the order")
    slow_engine.loop.fail(RuntimeError("the test ends this engine"))
    slow_engine.join()
    engine = start_engine()
    async with asyncio.timeout(20):
        result = await aborting
        _, (end,) = await stream.whole()
    assert (result.found, result.state, end.reason) == (True, "ended", FinishReason.ABORT)
    assert 0 < result.num_tokens < 450
    await settled(engine)


async def test_an_abort_without_confirmation_is_unconfirmed(
    slow_engine: RunningEngine, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as deaf:
        deaf.setattr(slow_engine.loop, "_obey", lambda command, report: None)
        stream = await add_long(client)
        assert (await client.abort(MODEL, stream.request_id, timeout=0.2)).state == "unconfirmed"
    assert (await client.abort(MODEL, stream.request_id)).state == "ended"
    await settled(slow_engine)
