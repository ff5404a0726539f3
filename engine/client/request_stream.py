"""One request as its client sees it: outputs in order, each exactly once, whatever the transport loses or repeats.

Pub/sub may drop messages and failover may repeat them. Every output carries its offset, so a stream drops what it has and knows
what it lacks; that its client (`engine.client.client`) asks the engine for, or takes from the record.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from engine.protocol import (
    EngineCoreRequest,
    FinishedOutput,
    FinishReason,
    OutputLogprobs,
    OutputPromptLogprobs,
    RequestTimes,
    StoredOutput,
    decode_column,
)

FIRST_PROBE_SECONDS = 2.0
LONGEST_PROBE_SECONDS = 16.0


@dataclass(slots=True)
class ChoiceDelta:
    """What one choice got since the last update."""

    choice: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[OutputLogprobs] = field(default_factory=list)  # one a token when asked for, else empty
    finished: FinishedOutput | None = None


@dataclass(slots=True)
class RequestUpdate:
    deltas: list[ChoiceDelta] = field(default_factory=list)
    prompt_logprobs: list[OutputPromptLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class _Choice:
    index: int
    num_received: int = 0  # tokens taken in, in order, without a gap
    terminal: FinishedOutput | None = None  # arrived; stands once all its tokens did
    finished: bool = False  # the terminal output was taken in
    stopped: bool = False  # the API server found a stop string: later tokens do not count
    pending: ChoiceDelta | None = None

    def delta(self) -> ChoiceDelta:
        if self.pending is None:
            self.pending = ChoiceDelta(self.index)
        return self.pending


class RequestStream:
    """Async iterator of `RequestUpdate`; ends after every choice's one terminal output.

    Everything that arrived since the last update is merged into one, so that a slow reader holds its own output and nothing else.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        model: str,
        finish: Callable[[RequestStream, int, FinishReason, int, str | None], Coroutine[Any, Any, None]],
        closed: Callable[[RequestStream], None],
    ) -> None:
        self.request_id = request.request_id
        self.handle = request.handle
        self.model = model
        self.enqueued = False  # Redis has said so: the request's record exists
        self.last_heard = 0.0  # the client's clock; when a token last came for this request, or it was asked after
        self.probe_interval = FIRST_PROBE_SECONDS  # of silence, after which it is asked after
        self._choices = [_Choice(index) for index in range(request.sampling.n)]
        self._prompt_logprobs: list[OutputPromptLogprobs] = []
        self._prompt_position = 1  # next prompt position whose logprobs are wanted
        asked = request.sampling.prompt_logprobs is not None
        self._prompt_end = len(request.prompt_token_ids) // 4 if asked else 1
        self._arrived = False  # something that the reader has not got
        self._reader: asyncio.Future[None] | None = None  # waits for it
        self._failure: Exception | None = None  # of the shortcut, the reader's to raise
        self.shortcut: Callable[[int], bool] | None = None
        """Takes a plain token that comes while the reader waits, in the reader's stead; or answers False. The order stays: a reader
        that waits has had all that came before."""
        self._finish = finish
        self._closed = closed

    # What the reader calls

    def __aiter__(self) -> AsyncIterator[RequestUpdate]:
        return self

    async def __anext__(self) -> RequestUpdate:
        while not self._arrived:
            if self.done:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._arrived = False
        if self._failure is not None:
            raise self._failure
        update = RequestUpdate()
        if self._prompt_logprobs:
            update.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        for choice in self._choices:
            if choice.pending is not None:
                update.deltas.append(choice.pending)
                choice.pending = None
        return update

    def _wake(self) -> None:
        """There is something to read. One reader, one future: an `asyncio.Event` costs three times as much a token."""
        self._arrived = True
        if self._reader is not None:
            if not self._reader.done():
                self._reader.set_result(None)
            self._reader = None

    async def stop(self, choice: int, keep: int, stop_reason: str | None) -> None:
        """A stop string ended choice `choice` inside its first `keep` tokens. Its terminal output still comes, no token does."""
        state = self._choices[choice]
        state.stopped = True
        if not state.finished:
            await self._finish(self, choice, FinishReason.STOP, keep, stop_reason)

    async def abort(self) -> None:
        """The client is gone: nothing more is wanted. Idempotent, and harmless after the end."""
        if not self.done:
            for choice in self._choices:
                choice.finished = True
            self._wake()
            self._closed(self)
            await self._finish(self, -1, FinishReason.ABORT, -1, None)

    @property
    def done(self) -> bool:
        for choice in self._choices:  # most have one: a generator would cost more than all else here
            if not choice.finished:
                return False
        return True

    # What the client's subscriber calls

    def heard(self, now: float) -> None:
        self.last_heard = now
        self.probe_interval = FIRST_PROBE_SECONDS

    def probed(self, now: float) -> None:
        self.last_heard = now
        self.probe_interval = min(2 * self.probe_interval, LONGEST_PROBE_SECONDS)

    def take_token(self, choice: int, offset: int, token_id: int, logprobs: OutputLogprobs | None) -> bool:
        """Take in one output token. False: tokens before it are missing."""
        state = self._choices[choice]
        if state.finished or state.stopped or offset < state.num_received:
            return True
        if offset > state.num_received:
            return False
        state.num_received += 1
        if self._reader is not None and self.shortcut is not None and logprobs is None and state.terminal is None:
            try:
                if self.shortcut(token_id):
                    return True
            except Exception as error:
                self._failure = error
                self._wake()
                return True
        delta = state.pending or state.delta()
        delta.token_ids.append(token_id)
        if logprobs is not None:
            delta.logprobs.append(logprobs)
        self._wake()
        if state.terminal is not None:
            self._settle(state)
        return True

    def take_prompt_logprobs(self, entry: OutputPromptLogprobs) -> bool:
        count = len(entry.ranks) // 4
        skip = self._prompt_position - entry.position
        if skip < 0:
            return False
        if skip < count:
            self._prompt_logprobs.append(entry if not skip else _tail(entry, skip, count))
            self._prompt_position += count - skip
            self._wake()
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
        """The request is over and this is its record: deliver what is missing, and the end."""
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

    def missing_from(self) -> list[tuple[int, int]]:
        """(choice, offset) from which each open choice lacks, or may lack, output."""
        return [(state.index, state.num_received) for state in self._choices if not state.finished]

    def _settle(self, state: _Choice) -> bool:
        terminal = state.terminal
        if terminal is None:
            return True
        whole = terminal.reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not state.stopped and state.num_received < terminal.num_tokens:
            return False
        if whole and self._prompt_position < self._prompt_end:
            return False
        state.finished = True
        state.delta().finished = terminal
        self._wake()
        if self.done:
            self._closed(self)
        return True


def _tail(entry: OutputPromptLogprobs, skip: int, count: int) -> OutputPromptLogprobs:
    row = len(entry.token_ids) // count
    return OutputPromptLogprobs(
        entry.handle, entry.position + skip, entry.token_ids[row * skip :], entry.logprobs[row * skip :], entry.ranks[4 * skip :]
    )
