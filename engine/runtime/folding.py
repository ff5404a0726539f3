"""The output of a request that dead engines have made, put together from what they left in Redis.

An engine that continues a request reads the output that checkpoints stored, and the journals behind it. These hold messages of
several engines to several API servers. The messages may overlap and repeat each other, and come in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.protocol import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedOutput,
    FinishReason,
    OutputLogprobs,
    OutputPromptLogprobs,
    RequestTimes,
    decode_column,
    encode_column,
)
from engine.scheduling.request import Request
from gpu.plan import Int32Array


@dataclass
class FoldedChoice:
    """What is known of one choice: a run of tokens from the first on, without a hole."""

    token_ids: Int32Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    logprobs: list[OutputLogprobs] = field(default_factory=list)  # of each token, in order; empty when not asked for
    end: FinishedOutput | None = None  # it had ended; has more tokens only where a stop string ended it and some are lost


@dataclass
class FoldedOutput:
    """A request's output so far. All handles in it are those of the request's present attachment."""

    choices: list[FoldedChoice]  # [n]
    prompt_logprobs: list[OutputPromptLogprobs] = field(default_factory=list)  # in order, without a hole from position 1 on
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache answered in the first engine
    times: RequestTimes = field(default_factory=RequestTimes)  # of the first engine, as far as known

    def resume(self, requests: list[Request]) -> None:
        """Let new requests, one a choice, go on behind this output. One that had ended has ended."""
        for request, choice in zip(requests, self.choices, strict=True):
            request.resume(choice.token_ids, self.num_cached_tokens, self.times)
            if (end := choice.end) is None:
                continue
            if isinstance(end.stop_reason, str) and end.num_tokens > len(choice.token_ids):
                request.ordered_stop = end.num_tokens, end.stop_reason
            else:
                request.num_cached_tokens, request.times = end.num_cached_tokens, msgspec.structs.replace(end.times)
                request.end(end.reason, end.num_tokens, end.stop_reason, end.error, end.times.finished)
        if self.prompt_logprobs:
            requests[0].num_prompt_logprobs = self.prompt_logprobs[-1].end

    def as_message(self, handle: int) -> EngineCoreOutputs:
        """The whole output under one handle, as checkpoints store it."""
        counts = [len(choice.token_ids) for choice in self.choices]
        return EngineCoreOutputs(
            "",
            0,
            0,
            handles=encode_column(np.full(sum(counts), handle), np.int64),
            choices=encode_column(np.repeat(np.arange(len(counts)), counts)),
            offsets=encode_column(np.concatenate([np.arange(count) for count in counts])),
            token_ids=encode_column(np.concatenate([choice.token_ids for choice in self.choices])),
            logprobs=[told for choice in self.choices for told in choice.logprobs],
            prompt_logprobs=list(self.prompt_logprobs),
            finished=[choice.end for choice in self.choices if choice.end is not None],
        )


def fold(
    source: EngineCoreRequest,
    parts: Iterable[tuple[str | None, EngineCoreOutputs]],
    attachments: Iterable[tuple[str, int]],
    num_cached_tokens: int = 0,
    times: RequestTimes | None = None,
) -> FoldedOutput:
    """What `parts`, each a message and the API server that it was sent to, tell of the request. None: the request's own rows only.

    `source` names the present attachment, `attachments` are all (client, handle) that the request has had. Outputs are united by
    choice and offset; where several differ, the oldest engine's stand. What lies behind a hole is dropped: sampling makes it again.
    """
    handles: dict[str, set[int]] = {}
    for client_name, handle in attachments:
        handles.setdefault(client_name, set()).add(handle)
    collected = _Collected(source)
    for client, message in sorted(parts, key=lambda part: _age(part[1])):
        if client is None:
            collected.add(message, None)
        elif client in handles:
            collected.add(message, handles[client])
    return collected.fold(num_cached_tokens, times)


def by_attachment(parts: Iterable[tuple[str, EngineCoreOutputs]]) -> dict[tuple[str, int], EngineCoreOutputs]:
    """One engine's messages to API servers, put together anew: one message with all rows of each (client, handle).

    A journal with many requests is read once with this; then each request has its rows apart.
    """
    messages: dict[str, list[EngineCoreOutputs]] = {}
    for client, message in sorted(parts, key=lambda part: _age(part[1])):
        messages.setdefault(client, []).append(message)
    return {(client, handle): rows for client, each in messages.items() for handle, rows in _by_handle(each).items()}


def _by_handle(messages: list[EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
    first = messages[0]
    regrouped: dict[int, EngineCoreOutputs] = {}

    def of(handle: int) -> EngineCoreOutputs:
        if handle not in regrouped:
            regrouped[handle] = EngineCoreOutputs(
                first.engine, first.incarnation, first.flush_number, logprobs=[], prompt_logprobs=[], finished=[]
            )
        return regrouped[handle]

    handles = np.concatenate([decode_column(message.handles, np.int64) for message in messages])
    order = handles.argsort(kind="stable")
    found, starts = np.unique(handles[order], return_index=True)
    for name in ("handles", "choices", "offsets", "token_ids"):
        dtype: type[np.generic] = np.int64 if name == "handles" else np.int32
        column = np.concatenate([decode_column(getattr(message, name), dtype) for message in messages])[order]
        for handle, part in zip(found.tolist(), np.split(column, starts[1:]), strict=False):
            setattr(of(handle), name, part.tobytes())
    for message in messages:
        for told in message.logprobs:
            of(told.handle).logprobs.append(told)
        for prompt_told in message.prompt_logprobs:
            of(prompt_told.handle).prompt_logprobs.append(prompt_told)
        for end in message.finished:
            of(end.handle).finished.append(end)
    return regrouped


def _age(message: EngineCoreOutputs) -> tuple[int, int]:
    """Less is older: incarnations are times."""
    return message.incarnation, message.flush_number


class _Collected:
    """The rows of one request, the first that came for each place."""

    def __init__(self, source: EngineCoreRequest) -> None:
        self._source = source
        n = source.sampling.n
        self._tokens: list[dict[int, int]] = [{} for _ in range(n)]  # by choice: token id by offset
        self._logprobs: list[dict[int, OutputLogprobs]] = [{} for _ in range(n)]
        self._ends: list[FinishedOutput | None] = [None] * n
        self._prompt_logprobs: list[OutputPromptLogprobs] = []

    def add(self, message: EngineCoreOutputs, handles: Collection[int] | None) -> None:
        """The rows of `handles`; None: all rows."""
        for choice, offset, token_id in _rows(message, handles).tolist():
            self._tokens[choice].setdefault(offset, token_id)
        for told in message.logprobs:
            if handles is None or told.handle in handles:
                self._logprobs[told.choice].setdefault(told.offset, told)
        for prompt_told in message.prompt_logprobs:
            if handles is None or prompt_told.handle in handles:
                self._prompt_logprobs.append(prompt_told)
        for end in message.finished:
            if (handles is None or end.handle in handles) and self._ends[end.choice] is None:
                self._ends[end.choice] = end

    def fold(self, num_cached_tokens: int, times: RequestTimes | None) -> FoldedOutput:
        prompt_logprobs = self._fold_prompt_logprobs()
        choices = [self._fold_choice(choice) for choice in range(len(self._ends))]
        if self._lacks_prompt_logprobs(prompt_logprobs):  # they are told before the first token of choice 0
            choices[0] = self._fold_end(0, FoldedChoice())
        first = next((end for end in self._ends if end is not None), None)
        if first is not None:
            num_cached_tokens = num_cached_tokens or first.num_cached_tokens
            times = times or msgspec.structs.replace(first.times, last_token=0.0, finished=0.0, num_preemptions=0)
        return FoldedOutput(choices, prompt_logprobs, num_cached_tokens, times or RequestTimes())

    def _fold_choice(self, choice: int) -> FoldedChoice:
        tokens, logprobs = self._tokens[choice], self._logprobs[choice]
        wants_logprobs = self._source.sampling.logprobs is not None
        count = 0
        while count in tokens and (not wants_logprobs or count in logprobs):
            count += 1
        folded = FoldedChoice(np.array([tokens[offset] for offset in range(count)], dtype=np.int32))
        if wants_logprobs:
            folded.logprobs = [self._readdressed(logprobs[offset]) for offset in range(count)]
        return self._fold_end(choice, folded)

    def _fold_end(self, choice: int, folded: FoldedChoice) -> FoldedChoice:
        """`folded` with its end, if it stands. Where tokens before it are missing, sampling comes to most ends again. An abort or
        an error stands with the tokens that are left."""
        end = self._ends[choice]
        if end is None:
            return folded
        count = min(end.num_tokens, len(folded.token_ids))
        end = self._readdressed(end)
        if end.reason in (FinishReason.ABORT, FinishReason.ERROR):
            end = msgspec.structs.replace(end, num_tokens=count)
        elif count < end.num_tokens and not isinstance(end.stop_reason, str):
            return folded
        return FoldedChoice(folded.token_ids[:count], folded.logprobs[:count], end)

    def _fold_prompt_logprobs(self) -> list[OutputPromptLogprobs]:
        """Each position once, up to the first hole."""
        position = 1
        kept = []
        for told in sorted(self._prompt_logprobs, key=lambda told: told.position):
            if told.position > position:
                break
            if told.end > position:
                kept.append(self._readdressed(told.tail(position)))
                position = told.end
        return kept

    def _lacks_prompt_logprobs(self, told: list[OutputPromptLogprobs]) -> bool:
        if self._source.sampling.prompt_logprobs is None:
            return False
        return (told[-1].end if told else 1) < len(self._source.prompt_token_ids) // 4

    def _readdressed(self, output: Any) -> Any:
        """The output for the present attachment."""
        return output if output.handle == self._source.handle else msgspec.structs.replace(output, handle=self._source.handle)


def _rows(message: EngineCoreOutputs, handles: Collection[int] | None) -> NDArray[np.int32]:
    """[num_rows, 3] choice, offset and token id of the rows of `handles` (None: all)."""
    rows = np.stack([decode_column(column) for column in (message.choices, message.offsets, message.token_ids)], axis=1)
    if handles is None:
        return rows
    kept: NDArray[np.int32] = rows[np.isin(decode_column(message.handles, np.int64), list(handles))]
    return kept
