"""Streams against a lossy, repeating transport: every token once, in order, and exactly one end a choice."""

from __future__ import annotations

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
from tests.engine.following import Follower


class Finishes:
    def __init__(self) -> None:
        self.calls: list[tuple[int, FinishReason, int, str | None]] = []
        self.closed = 0

    def finish(self, stream: RequestStream, choice: int, reason: FinishReason, keep: int, stop_reason: str | None) -> None:
        self.calls.append((choice, reason, keep, stop_reason))

    def close(self, stream: RequestStream) -> None:
        self.closed += 1


def make_stream(n: int = 1, stop: dict[int, int] | None = None) -> tuple[RequestStream, Follower, Finishes]:
    request = EngineCoreRequest(PROTOCOL_VERSION, "r-1", encode_column([1, 2, 3]), SamplingParams(n=n), "api", 7)
    finishes, follower = Finishes(), Follower(stop or {})
    follower.stream = RequestStream(request, "model", follower, finishes.finish, finishes.close)
    return follower.stream, follower, finishes


def terminal(choice: int, num_tokens: int) -> FinishedOutput:
    return FinishedOutput(7, choice, num_tokens, FinishReason.LENGTH, None, 0, RequestTimes())


def told(follower: Follower, n: int = 1) -> tuple[list[list[int]], list[int]]:
    """Tokens, and whether the end came, by choice."""
    return [follower.tokens.get(choice, []) for choice in range(n)], [int(choice in follower.ends) for choice in range(n)]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.integers(0, 12), st.integers(0, 2**32))
def test_any_loss_and_repetition_with_replay_gives_each_token_once(n: int, length: int, seed: int) -> None:
    rng = random.Random(seed)
    wanted = [[100 * choice + offset for offset in range(length)] for choice in range(n)]
    stream, follower, finishes = make_stream(n)
    for _ in range(50):
        # the engine replays from what the stream says it lacks; the transport loses and repeats at will
        for choice, start in stream.lack().choices:
            for offset in range(start, length):
                for _ in range(rng.choice([0, 1, 1, 2])):
                    stream.take_token(choice, offset, wanted[choice][offset], None)
            if rng.random() < 0.5:
                stream.take_terminal(terminal(choice, length))
    for choice, start in stream.lack().choices:
        for offset in range(start, length):
            stream.take_token(choice, offset, wanted[choice][offset], None)
        stream.take_terminal(terminal(choice, length))
    assert told(follower, n) == (wanted, [1] * n)
    assert stream.done and finishes.closed == 1


def test_a_gap_is_told_and_the_end_waits_for_it() -> None:
    stream, follower, _ = make_stream()
    assert stream.take_token(0, 0, 5, None)
    assert not stream.take_token(0, 2, 7, None)
    assert not stream.take_terminal(terminal(0, 3))
    assert stream.lack().choices == [(0, 1)]
    assert stream.take_token(0, 1, 6, None) and stream.take_token(0, 2, 7, None)
    assert told(follower) == ([[5, 6, 7]], [1])


def test_a_stop_string_drops_later_tokens_and_still_ends_once() -> None:
    stream, follower, finishes = make_stream(stop={0: 2})
    for offset, token_id in enumerate((5, 6, 7)):
        stream.take_token(0, offset, token_id, None)
    assert finishes.calls == [(0, FinishReason.STOP, 2, "END")]
    assert told(follower) == ([[5, 6]], [0])
    stream.take_terminal(FinishedOutput(7, 0, 2, FinishReason.STOP, "END", 0, RequestTimes()))
    assert told(follower) == ([[5, 6]], [1])


def test_a_stop_string_in_late_tokens_wins_over_the_engines_end() -> None:
    """The engine's own end was here first, without the tokens before it."""
    stream, follower, finishes = make_stream(stop={0: 1})
    stream.take_terminal(terminal(0, 2))
    stream.take_token(0, 0, 5, None)
    assert finishes.calls == [(0, FinishReason.STOP, 1, "END")] and finishes.closed == 1
    assert told(follower) == ([[5]], [1])


def test_after_an_abort_nothing_comes() -> None:
    stream, follower, finishes = make_stream(2)
    stream.abort()
    stream.abort()
    stream.take_token(0, 0, 5, None)
    stream.take_terminal(terminal(1, 0))
    stream.take_end(FinishReason.ERROR, "gone")
    assert told(follower, 2) == ([[], []], [0, 0])
    assert finishes.calls == [(-1, FinishReason.ABORT, -1, None)] and finishes.closed == 1


def test_a_receiver_may_abort_in_the_middle_of_a_token() -> None:
    stream, follower, finishes = make_stream()
    stream.take_terminal(terminal(0, 1))
    taken = follower.take_token
    follower.take_token = lambda *token: (taken(*token), stream.abort())[0]  # type: ignore[method-assign]
    assert stream.take_token(0, 0, 5, None)
    assert told(follower) == ([[5]], [0]) and finishes.closed == 1


def test_the_record_completes_what_was_received() -> None:
    stream, follower, _ = make_stream(2)
    stream.take_token(0, 0, 5, None)
    kept = [StoredChoice(encode_column([5, 6]), FinishReason.STOP), StoredChoice(encode_column([8]), FinishReason.LENGTH)]
    stream.take_stored(StoredOutput(kept, 2, RequestTimes()))
    assert told(follower, 2) == ([[5, 6], [8]], [1, 1])


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_an_end_without_the_engines_word_ends_every_open_choice(reason: FinishReason) -> None:
    stream, follower, _ = make_stream(2)
    stream.take_token(0, 0, 5, None)
    stream.take_terminal(terminal(0, 1))
    stream.take_end(reason, "gone")
    ends = [(follower.ends[choice].reason, follower.ends[choice].error) for choice in range(2)]
    assert ends == [(FinishReason.LENGTH, None), (reason, "gone")]
