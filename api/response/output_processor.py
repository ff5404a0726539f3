"""One choice of an answer: tokens in, text out. Streams and whole answers are both made of what `ChoiceAssembler` gives.

Tokens are taken one at a time whatever arrives together, so how the engine's outputs are cut or merged on their way changes
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from api.text.detokenizer import Detokenizer
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


@dataclass(slots=True)
class ChoiceOutput:
    """What one choice has to say now. `finish_reason` is set once, in its last output."""

    index: int  # in the answer: prompt * n + choice
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def empty(self) -> bool:
        return not self.token_ids and not self.text and self.finish_reason is None


class ChoiceAssembler:
    """`stop_token_ids`: ids that end the request; their own text is shown only with `include_stop`."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        text_offset: int = 0,
    ) -> None:
        self.index = index
        self.num_tokens = 0  # of the answer: tokens behind a stop string do not count
        self.finished = False
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop, include_stop)
        self.is_plain = not stop  # no token's text is ever held back, none ends the choice
        self._min_tokens = min_tokens
        self._hidden_ids = frozenset() if include_stop else stop_token_ids
        self._text_offset = text_offset

    def feed(
        self, token_ids: Sequence[int], logprobs: Sequence[OutputLogprobs] = (), finished: FinishedOutput | None = None
    ) -> ChoiceOutput:
        """Take what came for this choice. After its end everything is dropped: later tokens, the engine's own word on the end."""
        if self.is_plain and finished is None and not logprobs and not self.finished:
            return ChoiceOutput(self.index, "".join([self.take_plain(token_id) for token_id in token_ids]), [*token_ids])
        output = ChoiceOutput(self.index)
        if self.finished:
            return output
        by_offset = {entry.offset: entry for entry in logprobs}
        texts: list[str] = []
        for token_id in token_ids:
            if (entry := by_offset.get(self.num_tokens)) is not None:
                output.logprobs.append(TokenLogprobs.from_output(entry, self._text_offset))
            output.token_ids.append(token_id)
            self.num_tokens += 1
            shown = self._show(token_id)
            if isinstance(shown, StopMatch):
                texts.append(shown.text)
                self._end(output, FinishReason.STOP, shown.stop)
                break
            texts.append(shown)
        if finished is not None and not self.finished:
            texts.append(self._rest(output))
            if not self.finished:
                self._end(output, finished.reason, finished.stop_reason)
                output.error = finished.error
        output.text = "".join(texts)
        return output

    def take_plain(self, token_id: int) -> str:
        """The text of one token of a choice that `is_plain` and has not ended: the way of nearly all."""
        self.num_tokens += 1
        if token_id in self._hidden_ids:
            return ""
        text = self._detokenizer.push(token_id)
        self._text_offset += len(text)
        return text

    def abort(self) -> ChoiceOutput:
        """The end where it is: the text that was held back comes with it."""
        output = ChoiceOutput(self.index, self._matcher.flush() + self._detokenizer.flush())
        self._end(output, FinishReason.ABORT, None)
        return output

    def _show(self, token_id: int) -> str | StopMatch:
        if token_id in self._hidden_ids:
            return ""
        text = self._detokenizer.push(token_id)
        self._text_offset += len(text)
        return self._matcher.push(text, armed=self.num_tokens > self._min_tokens)

    def _rest(self, output: ChoiceOutput) -> str:
        shown = self._matcher.push(self._detokenizer.flush(), armed=self.num_tokens > self._min_tokens)
        if isinstance(shown, StopMatch):
            self._end(output, FinishReason.STOP, shown.stop)
            return shown.text
        return shown + self._matcher.flush()

    def _end(self, output: ChoiceOutput, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finished = True
        output.finish_reason = reason
        output.stop_reason = stop_reason
