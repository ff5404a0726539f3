"""One request as its client sees it: outputs in order, each exactly once, though the transport loses and repeats some.

Pub/sub may drop messages and failover may repeat them. Every output carries its offset, so a stream drops what it has and knows
what it lacks. Its client asks the engine for that, or takes it from the record (`engine.client.repairs`). A stream keeps no output:
it hands each one to its receiver at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.protocol import (
    FOREVER,
    EngineCoreRequest,
    FinishedOutput,
    FinishReason,
    Lack,
    OutputLogprobs,
    OutputPromptLogprobs,
    RequestTimes,
    StoredOutput,
    decode_column,
)

FIRST_PAUSE = 2.0  # seconds of silence after which the client asks for output
LONGEST_PAUSE = 16.0


class Receiver(Protocol):
    """Gets the output of one request: of each choice its tokens in order, then one end. Called on the event loop, never raises."""

    def take_prompt_logprobs(self, part: OutputPromptLogprobs) -> None:
        """The parts come in order of their positions, each position once."""
        ...

    def take_token(self, choice: int, token_id: int, logprobs: OutputLogprobs | None) -> str | None:
        """Returns the stop string that this token completes, else None. Behind a stop string only the choice's end comes."""
        ...

    def take_end(self, choice: int, end: FinishedOutput) -> None: ...


@dataclass(slots=True)
class _Choice:
    index: int
    num_received: int = 0  # tokens taken in, in order, without a gap
    terminal: FinishedOutput | None = None  # arrived; stands once all its tokens did
    finished: bool = False  # the receiver has the end
    stopped: bool = False  # by a stop string: later tokens do not count


class RequestStream:
    """`finish` sends a command to the engine of the request; `closed` is called once, when nothing more will come."""

    def __init__(
        self,
        request: EngineCoreRequest,
        model: str,
        receiver: Receiver,
        finish: Callable[[RequestStream, int, FinishReason, int, str | None], None],
        closed: Callable[[RequestStream], None],
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.handle = request.handle
        self.model = model
        self.grace = request.facts.grace  # seconds that the request goes on when no stream listens any more
        # It goes on without listening, where another stream listens instead.
        self.follows = bool(request.facts.idempotency_key) or self.grace >= FOREVER
        self.listens = True
        self.may_enqueue = True  # `request` is whole: where Redis forgets it, the client enqueues it again
        self.enqueued = False  # Redis has said so: the request's record exists
        self.next_look = 0.0  # the client's clock: when it asks for output, if none comes before
        self.pause = FIRST_PAUSE  # seconds before that
        self.num_before: int | None = None  # requests that waited before it when that was last asked; None: it does not wait
        self.missed_since: float | None = None  # when Redis was first found to have no record of it
        self._choices = [_Choice(index) for index in range(request.sampling.n)]
        self._num_open = len(self._choices)
        self._prompt_position = 1  # next prompt position whose logprobs are wanted
        asked = request.sampling.prompt_logprobs is not None
        self._prompt_end = len(request.prompt_token_ids) // 4 if asked else 1
        self._receiver = receiver
        self._finish = finish
        self._closed = closed

    @property
    def done(self) -> bool:
        return not self._num_open

    def abort(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Nothing more is wanted, and nothing more is handed on. Idempotent, and harmless after the end. ERROR: it is late."""
        if not self.done:
            for choice in self._choices:
                choice.finished = True
            self._num_open = 0
            self._closed(self)
            self._finish(self, -1, reason, -1, None)

    # What the client's subscriber calls

    def heard(self, now: float) -> None:
        self.pause = FIRST_PAUSE
        self.next_look = now + FIRST_PAUSE

    def looked(self, now: float) -> None:
        """The client asks for output."""
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
        self.next_look = now + self.pause

    def not_found(self, now: float) -> None:
        """The engine that was asked does not hold the request, which has ended, has not arrived or has moved: look again soon."""
        self.next_look = min(self.next_look, now + self.pause / 8)

    def take_token(self, choice: int, offset: int, token_id: int, logprobs: OutputLogprobs | None) -> bool:
        """Take in one output token. False: tokens before it are missing."""
        state = self._choices[choice]
        if state.finished or state.stopped or offset < state.num_received:
            return True
        if offset > state.num_received:
            return False
        state.num_received += 1
        stop = self._receiver.take_token(choice, token_id, logprobs)
        if stop is not None:
            state.stopped = True
            self._finish(self, choice, FinishReason.STOP, state.num_received, stop)
        if state.terminal is not None:
            self._settle(state)
        return True

    def take_prompt_logprobs(self, entry: OutputPromptLogprobs) -> bool:
        position = self._prompt_position
        if entry.position > position:
            return False
        if entry.end > position and not self.done:
            self._prompt_position = entry.end
            self._receiver.take_prompt_logprobs(entry.tail(position))
        return True

    def take_terminal(self, terminal: FinishedOutput) -> bool:
        """Take in a choice's end. False: some of its tokens are missing yet."""
        state = self._choices[terminal.choice]
        if state.finished:
            return True
        state.terminal = terminal
        return self._settle(state)

    def take_end(self, reason: FinishReason, error: str | None) -> None:
        """The whole request ended without its engine's word: each open choice ends with what it has."""
        for state in self._choices:
            if not state.finished:
                state.terminal = FinishedOutput(
                    self.handle, state.index, state.num_received, reason, None, 0, RequestTimes(), error
                )
                self._settle(state)

    def take_stored(self, stored: StoredOutput) -> None:
        """The request is over and this is its record: hand on what is missing, and the end."""
        for entry in stored.prompt_logprobs:
            self.take_prompt_logprobs(entry)
        for state, kept in zip(self._choices, stored.choices, strict=False):
            token_ids = decode_column(kept.token_ids).tolist()
            by_offset = {entry.offset: entry for entry in kept.logprobs}
            for offset in range(state.num_received, len(token_ids)):
                self.take_token(state.index, offset, token_ids[offset], by_offset.get(offset))
            self.take_terminal(
                FinishedOutput(
                    self.handle,
                    state.index,
                    len(token_ids),
                    kept.reason,
                    kept.stop_reason,
                    stored.num_cached_tokens,
                    stored.times,
                    kept.error,
                )
            )
        if not self.done:
            self.take_end(FinishReason.ERROR, "The record of the request ends before its output does.")

    def lack(self) -> Lack:
        """The output that has not come, or may not have."""
        choices = [(state.index, state.num_received) for state in self._choices if not state.finished]
        return Lack(self.request_id, self.handle, choices, self._prompt_position if self._prompt_position < self._prompt_end else 0)

    def _settle(self, state: _Choice) -> bool:
        terminal = state.terminal
        if terminal is None or state.finished:
            return True
        whole = terminal.reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not state.stopped and state.num_received < terminal.num_tokens:
            return False
        if whole and self._prompt_position < self._prompt_end:
            return False
        state.finished = True
        self._num_open -= 1
        if self.done:
            self._closed(self)
        self._receiver.take_end(state.index, terminal)
        return True
