"""One choice of an answer: tokens in, text out. `Choice` makes the outputs of streams and of whole answers.

It takes tokens one at a time, so that it makes no difference how the engine's outputs are cut or merged on their way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from api.text.detokenizer import Detokenizer
from api.text.reasoning import ReasoningCounter
from api.text.stop_strings import StopMatch, StopMatcher
from engine.protocol import FinishedOutput, FinishReason, OutputLogprobs, decode_column


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of one token. `text_offset`: characters of the choice's text before it; `token_ids[0]` is the token itself."""

    text_offset: int
    token_ids: list[int]  # [1 + k] the token, then the top k
    logprobs: list[float]  # [1 + k]
    rank: int
    text: str | None = None  # of an echoed prompt's token, where it differs from the token's own

    @classmethod
    def from_output(cls, output: OutputLogprobs, text_offset: int) -> TokenLogprobs:
        values: list[float] = decode_column(output.logprobs, np.float32).tolist()
        return cls(text_offset, decode_column(output.token_ids).tolist(), values, output.rank)


class ChoiceOutput(msgspec.Struct, gc=False):
    """A piece of what one choice says. `finish_reason` is set once, in its last piece."""

    index: int  # in the answer: prompt * n + choice
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    pieces: Sequence[ChoiceOutput] = ()  # that it was merged of, where they matter


class CollectedOutput:
    """Pieces of one choice that become one: a whole answer, or what a slow client has not read yet."""

    def __init__(self, index: int, keeps_pieces: bool = False) -> None:
        self._pieces: list[ChoiceOutput] | None = [] if keeps_pieces else None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._last = ChoiceOutput(index)

    def add(self, output: ChoiceOutput) -> None:
        if self._pieces is not None:
            self._pieces.append(output)
        self._texts.append(output.text)
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs
        if output.finish_reason is not None:
            self._last = output

    def output(self) -> ChoiceOutput:
        last = self._last
        return ChoiceOutput(
            last.index,
            "".join(self._texts),
            self._token_ids,
            self._logprobs,
            last.finish_reason,
            last.stop_reason,
            self._pieces or (),
        )


class _WaitingToken(NamedTuple):
    """A token whose text may still become a stop string. `start`, `end`: of its text, in characters like `text_offset`."""

    token_id: int
    logprobs: TokenLogprobs | None
    start: int
    end: int


class Choice:
    """Tokens and their logprobs are told with their text: those of a stop string that is not shown are left out with it.

    `stop_token_ids`: ids that end the request; their own text is shown only with `include_stop`.

    `text_offset`: characters of an echoed prompt, which stand before the output.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        text_offset: int = 0,
        reasoning: ReasoningCounter | None = None,
    ) -> None:
        self.index = index
        self.reasoning = reasoning  # None: the answer has none
        self.num_tokens = 0  # of the answer: tokens behind a stop string do not count
        self.finish_reason: FinishReason | None = None  # once it has ended
        self.last_token = 0.0  # epoch seconds; 0: none has come
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop, include_stop) if stop else None
        self._min_tokens = min_tokens
        self._hidden_ids = frozenset() if include_stop else stop_token_ids
        self._text_offset = text_offset
        self._num_shown = text_offset  # characters
        self._waiting: deque[_WaitingToken] = deque()

    def take(self, token_id: int, logprobs: OutputLogprobs | None = None) -> ChoiceOutput:
        """The next token. The output has a finish reason where it completes a stop string, whose token this is then the last."""
        self.num_tokens += 1
        text = "" if token_id in self._hidden_ids else self._detokenizer.push(token_id)
        output = ChoiceOutput(self.index, text, (token_id,))
        if self.reasoning is not None:
            self.reasoning.feed(text)
        if logprobs is not None:
            output.logprobs = (TokenLogprobs.from_output(logprobs, self._text_offset),)
        self._text_offset += len(text)
        if self._matcher is not None:
            told = output.logprobs[0] if output.logprobs else None
            output.token_ids, output.logprobs = (), ()
            self._waiting.append(_WaitingToken(token_id, told, self._text_offset - len(text), self._text_offset))
            self._match(output, self._matcher)
        return output

    def finish(self, end: FinishedOutput) -> ChoiceOutput:
        """The engine's word that no token follows: the text that was held back. Nothing where a stop string was the end."""
        output = ChoiceOutput(self.index)
        if self.finish_reason is None:
            output.text = self._detokenizer.flush()
            if self._matcher is not None:
                self._match(output, self._matcher)
        if self.finish_reason is None:
            output.text += self._held()
            self._tell(output, len(self._waiting))
            self._end(output, end.reason, end.stop_reason)
        return output

    def abort(self) -> ChoiceOutput:
        """The end where it is: the text that was held back comes with it."""
        output = ChoiceOutput(self.index, self._held() + self._detokenizer.flush())
        self._tell(output, len(self._waiting))
        self._end(output, FinishReason.ABORT, None)
        return output

    def _held(self) -> str:
        """Text that might have become a stop string."""
        return "" if self._matcher is None else self._matcher.flush()

    def _match(self, output: ChoiceOutput, matcher: StopMatcher) -> None:
        """Leave of the output's new text what may be shown now, and tell the tokens that it is of."""
        shown = matcher.push(output.text, armed=self.num_tokens > self._min_tokens)
        output.text = shown.text if isinstance(shown, StopMatch) else shown
        self._num_shown += len(output.text)
        if isinstance(shown, StopMatch):
            self._tell(output, sum(1 for token in self._waiting if token.start < self._num_shown))
            self._end(output, FinishReason.STOP, shown.stop)
        else:  # a token without text, such as half a character, waits for the next text
            whole = (token for token in self._waiting if token.end <= self._num_shown and token.start < self._num_shown)
            self._tell(output, sum(1 for _ in whole))

    def _tell(self, output: ChoiceOutput, count: int) -> None:
        """The next `count` of the waiting tokens."""
        told = [self._waiting.popleft() for _ in range(count)]
        output.token_ids = [*output.token_ids, *(token.token_id for token in told)]
        output.logprobs = [*output.logprobs, *(token.logprobs for token in told if token.logprobs is not None)]

    def _end(self, output: ChoiceOutput, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finish_reason = output.finish_reason = reason
        output.stop_reason = stop_reason
