"""Streams against a lossy, repeating transport: every token once, in order, and exactly one end a choice."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.client.request_stream import RequestStream
from engine.protocol import (
    PROTOCOL_VERSION,
    EngineCoreRequest,
    FinishedOutput,
    FinishReason,
    RequestTimes,
    StoredChoice,
    StoredOutput,
    encode_column,
)
from gpu.plan import SamplingParams


class Finishes:
    def __init__(self) -> None:
        self.calls: list[tuple[int, FinishReason, int, str | None]] = []
        self.closed = 0

    async def finish(self, stream: RequestStream, choice: int, reason: FinishReason, keep: int, stop_reason: str | None) -> None:
        self.calls.append((choice, reason, keep, stop_reason))

    def close(self, stream: RequestStream) -> None:
        self.closed += 1


def make_stream(n: int = 1) -> tuple[RequestStream, Finishes]:
    request = EngineCoreRequest(PROTOCOL_VERSION, "r-1", encode_column([1, 2, 3]), SamplingParams(n=n), "api", 7)
    finishes = Finishes()
    return RequestStream(request, "model", finishes.finish, finishes.close), finishes


def terminal(choice: int, num_tokens: int) -> FinishedOutput:
    return FinishedOutput(7, choice, num_tokens, FinishReason.LENGTH, None, 0, RequestTimes())


async def drain(stream: RequestStream, n: int) -> tuple[list[list[int]], list[int]]:
    tokens: list[list[int]] = [[] for _ in range(n)]
    ends = [0] * n
    async for update in stream:
        for delta in update.deltas:
            assert not ends[delta.choice], "output after the end"
            tokens[delta.choice] += delta.token_ids
            ends[delta.choice] += delta.finished is not None
    return tokens, ends


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.integers(0, 12), st.integers(0, 2**32))
def test_any_loss_and_repetition_with_replay_gives_each_token_once(n: int, length: int, seed: int) -> None:
    rng = random.Random(seed)
    wanted = [[100 * choice + offset for offset in range(length)] for choice in range(n)]

    async def scenario() -> None:
        stream, finishes = make_stream(n)
        reader = asyncio.create_task(drain(stream, n))
        for _ in range(50):
            # the engine replays from what the stream says it lacks; the transport loses and repeats at will
            for choice, start in stream.missing_from():
                for offset in range(start, length):
                    for _ in range(rng.choice([0, 1, 1, 2])):
                        stream.take_token(choice, offset, wanted[choice][offset], None)
                if rng.random() < 0.5:
                    stream.take_terminal(terminal(choice, length))
            await asyncio.sleep(0)
        for choice, start in stream.missing_from():
            for offset in range(start, length):
                stream.take_token(choice, offset, wanted[choice][offset], None)
            stream.take_terminal(terminal(choice, length))
        tokens, ends = await reader
        assert tokens == wanted and ends == [1] * n
        assert stream.done and finishes.closed == 1

    asyncio.run(scenario())


async def test_a_gap_is_told_and_the_end_waits_for_it() -> None:
    stream, _ = make_stream()
    assert stream.take_token(0, 0, 5, None)
    assert not stream.take_token(0, 2, 7, None)
    assert not stream.take_terminal(terminal(0, 3))
    assert stream.missing_from() == [(0, 1)]
    assert stream.take_token(0, 1, 6, None) and stream.take_token(0, 2, 7, None)
    assert (await drain(stream, 1)) == ([[5, 6, 7]], [1])


async def test_updates_of_a_slow_reader_are_merged() -> None:
    stream, _ = make_stream()
    for offset in range(100):
        stream.take_token(0, offset, offset, None)
    update = await anext(stream)
    assert update.deltas[0].token_ids == list(range(100))


async def test_stop_drops_later_tokens_and_still_ends_once() -> None:
    stream, finishes = make_stream()
    stream.take_token(0, 0, 5, None)
    assert (await anext(stream)).deltas[0].token_ids == [5]
    await stream.stop(0, 1, "END")
    assert finishes.calls == [(0, FinishReason.STOP, 1, "END")]
    stream.take_token(0, 1, 6, None)
    stream.take_terminal(FinishedOutput(7, 0, 1, FinishReason.STOP, "END", 0, RequestTimes()))
    assert (await drain(stream, 1)) == ([[]], [1])


async def test_abort_ends_the_iteration_and_is_idempotent() -> None:
    stream, finishes = make_stream(2)
    reader = asyncio.create_task(drain(stream, 2))
    await asyncio.sleep(0)
    await stream.abort()
    await stream.abort()
    stream.take_token(0, 0, 5, None)
    assert (await reader) == ([[], []], [0, 0])
    assert finishes.calls == [(-1, FinishReason.ABORT, -1, None)] and finishes.closed == 1


async def test_the_record_completes_what_was_received() -> None:
    stream, _ = make_stream(2)
    stream.take_token(0, 0, 5, None)
    kept = [StoredChoice(encode_column([5, 6]), FinishReason.STOP), StoredChoice(encode_column([8]), FinishReason.LENGTH)]
    stream.take_stored(StoredOutput(kept, 2, RequestTimes()))
    assert (await drain(stream, 2)) == ([[5, 6], [8]], [1, 1])


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
async def test_an_end_without_the_engines_word_ends_every_open_choice(reason: FinishReason) -> None:
    stream, _ = make_stream(2)
    stream.take_token(0, 0, 5, None)
    stream.take_terminal(terminal(0, 1))
    stream.take_end(reason, "gone")
    update = await anext(stream)
    assert [(delta.finished.reason, delta.finished.error) for delta in update.deltas if delta.finished] == [
        (FinishReason.LENGTH, None),
        (reason, "gone"),
    ]
