"""Output published once more, for streams that lack some of it: the one message that answers a `Replay`.

The message is bounded, because Redis hangs up on a subscriber that lags behind by too many bytes. Streams for which it has no room
are named, and their client asks again from where they are then: it sets the pace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np

from engine.protocol import EngineCoreOutputs, FinishedOutput, Lack, OutputLogprobs, OutputPromptLogprobs, Replay, encode_column
from engine.runtime.held_requests import HeldRequest, HeldRequests
from engine.scheduling.request import Request
from gpu.plan import Int32Array

MESSAGE_BYTES = 1 << 20  # after which a message takes nothing more
ROW_BYTES = 20  # of a token in the columns
ENTRY_BYTES = 40  # of logprobs beside their columns, and of an end, about

Entry = TypeVar("Entry", OutputLogprobs, OutputPromptLogprobs, FinishedOutput)


def replay(command: Replay, held_requests: HeldRequests, tokens_of: Callable[[Request, int], Int32Array]) -> EngineCoreOutputs:
    """The output that the command's streams lack, up to where their choices are now.

    `tokens_of` gives a choice's output tokens from an offset on. The publisher fills in engine, incarnation and flush number.
    """
    draft = _Draft()
    for lack in command.lacks:
        held = held_requests.get(lack.request_id)
        if held is None:
            draft.not_held.append(lack.handle)
        elif draft.full or not draft.fill(lack, held, tokens_of):
            draft.cut_short.append(lack.handle)
        else:
            draft.replayed.append(lack.handle)
    return draft.message()


class _Draft:
    """A message in the making."""

    def __init__(self) -> None:
        self.replayed: list[int] = []
        self.cut_short: list[int] = []
        self.not_held: list[int] = []
        self._size = 0  # bytes, about
        self._runs: list[tuple[int, int, int, Int32Array]] = []  # handle, choice, offset of the first token, tokens
        self._logprobs: list[OutputLogprobs] = []
        self._prompt_logprobs: list[OutputPromptLogprobs] = []
        self._finished: list[FinishedOutput] = []

    @property
    def full(self) -> bool:
        return self._size >= MESSAGE_BYTES

    def fill(self, lack: Lack, held: HeldRequest, tokens_of: Callable[[Request, int], Int32Array]) -> bool:
        """Add what the stream lacks. False: there is more than the message has room for."""
        if lack.prompt_position and not self._add_prompt_logprobs(lack, held.prompt_logprobs):
            return False
        for choice, offset in lack.choices:
            if choice >= len(held.choices):
                continue
            if self.full:
                return False
            request = held.choices[choice]
            tokens = tokens_of(request, offset)
            if len(tokens) and not self._add_tokens(lack.handle, choice, offset, tokens, held.logprobs[choice][offset:]):
                return False
            if not held.is_open(choice):  # its siblings run
                self._size += ENTRY_BYTES
                self._finished.append(_addressed(held.finished_output(request), lack.handle))
        return True

    def _add_prompt_logprobs(self, lack: Lack, entries: list[OutputPromptLogprobs]) -> bool:
        for entry in entries:
            if entry.end > lack.prompt_position:
                if self.full:
                    return False
                self._size += ENTRY_BYTES + len(entry.token_ids) + len(entry.logprobs) + len(entry.ranks)
                self._prompt_logprobs.append(_addressed(entry, lack.handle))
        return True

    def _add_tokens(self, handle: int, choice: int, offset: int, tokens: Int32Array, logprobs: list[OutputLogprobs]) -> bool:
        """`logprobs`: of these tokens in their order, or none."""
        room = MESSAGE_BYTES - self._size
        count = min(len(tokens), -(-room // ROW_BYTES))
        for position, entry in enumerate(logprobs[:count]):
            if self.full:
                count = position
                break
            self._size += ENTRY_BYTES + len(entry.token_ids) + len(entry.logprobs)
            self._logprobs.append(_addressed(entry, handle))
        self._size += count * ROW_BYTES
        self._runs.append((handle, choice, offset, tokens[:count]))
        return count == len(tokens)

    def message(self) -> EngineCoreOutputs:
        handles, choices, offsets, tokens = zip(*self._runs, strict=True) if self._runs else ((), (), (), ())
        counts = np.array([len(run) for run in tokens], dtype=np.int64)
        before = np.cumsum(counts) - counts  # rows in front of each run
        return EngineCoreOutputs(
            engine="",
            incarnation=0,
            flush_number=0,
            handles=encode_column(np.repeat(np.array(handles, dtype=np.int64), counts), np.int64),
            choices=encode_column(np.repeat(np.array(choices, dtype=np.int64), counts)),
            offsets=encode_column(np.arange(counts.sum()) + np.repeat(np.array(offsets, dtype=np.int64) - before, counts)),
            token_ids=encode_column(np.concatenate(tokens)) if tokens else b"",
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            finished=self._finished,
            replayed=self.replayed,
            cut_short=self.cut_short,
            not_held=self.not_held,
        )


def _addressed(entry: Entry, handle: int) -> Entry:
    """Under the handle of the stream that lacks it, which may not be the one that it was made for."""
    return entry if entry.handle == handle else msgspec.structs.replace(entry, handle=handle)
