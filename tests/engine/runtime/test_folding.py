"""The output of dead engines, put together from their messages: the same however it was cut, repeated and shuffled."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedOutput,
    FinishReason,
    OutputLogprobs,
    OutputPromptLogprobs,
    RequestTimes,
    SamplingParams,
    decode_column,
    encode_column,
)
from engine.runtime.folding import FoldedOutput, by_attachment, fold

ATTACHMENTS = [("api:1", 7), ("api:2", 7), ("api:1", 9)]  # the last is the present one
OTHER = 8  # a handle of another request at each API server
PROMPT = 12
Part = tuple[str, EngineCoreOutputs]


def make_source(n: int = 1, logprobs: int | None = None, prompt_logprobs: int | None = None) -> EngineCoreRequest:
    sampling = SamplingParams(n=n, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    return EngineCoreRequest(1, "r-1", encode_column(np.arange(PROMPT)), sampling, *ATTACHMENTS[-1])


def token(choice: int, offset: int) -> int:
    return 1000 * choice + offset


def logprobs_of(handle: int, choice: int, offset: int) -> OutputLogprobs:
    return OutputLogprobs(handle, choice, offset, encode_column([token(choice, offset)]), encode_column([0.5], np.float32), offset)


def prompt_logprobs_of(handle: int, first: int, last: int) -> OutputPromptLogprobs:
    positions = np.arange(first, last)
    values = np.stack([positions, -positions], axis=1)
    return OutputPromptLogprobs(handle, first, encode_column(values), encode_column(values, np.float32), encode_column(positions))


def end_of(handle: int, choice: int, num_tokens: int, reason: FinishReason = FinishReason.LENGTH) -> FinishedOutput:
    return FinishedOutput(handle, choice, num_tokens, reason, None, 4, RequestTimes(1.0, 2.0, 3.0, 4.0, 5.0, 6.0))


@dataclass
class Message:
    """A message under construction; rows are (choice, offset)."""

    client: str
    handle: int
    number: int
    rows: list[tuple[int, int]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, int]] = field(default_factory=list)
    ends: list[tuple[int, int, FinishReason]] = field(default_factory=list)
    logprobs: bool = False
    incarnation: int = 1

    def build(self) -> Part:
        handles = [handle for _ in self.rows for handle in (OTHER, self.handle)]  # each row has another request's beside it
        rows = [row for row in self.rows for _ in range(2)]
        return self.client, EngineCoreOutputs(
            "m:0",
            self.incarnation,
            self.number,
            encode_column(handles, np.int64),
            encode_column([choice for choice, _ in rows]),
            encode_column([offset for _, offset in rows]),
            encode_column([token(*row) + 500 * (handle == OTHER) for row, handle in zip(rows, handles, strict=True)]),
            [logprobs_of(handle, *row) for row, handle in zip(rows, handles, strict=True)] if self.logprobs else [],
            [prompt_logprobs_of(handle, *span) for span in self.prompt_logprobs for handle in (OTHER, self.handle)],
            [end_of(handle, *end) for end in self.ends for handle in (OTHER, self.handle)],
        )


def told(folded: FoldedOutput) -> object:
    """All that it says; prompt logprobs in one column, because they may be cut in any way."""
    prompt = [b"".join(getattr(part, name) for part in folded.prompt_logprobs) for name in ("token_ids", "logprobs", "ranks")]
    choices = [(choice.token_ids.tolist(), choice.logprobs, choice.end) for choice in folded.choices]
    return choices, prompt, folded.num_cached_tokens, folded.times


@st.composite
def runs(draw: st.DrawFn) -> tuple[EngineCoreRequest, list[int], list[bool], int]:
    """A request, how far its choices came, which of them ended, and how many prompt logprobs were told."""
    n = draw(st.integers(1, 3))
    source = make_source(n, draw(st.sampled_from([None, 0])), draw(st.sampled_from([None, 1])))
    counts = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    ended = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    told = draw(st.integers(1, PROMPT)) if not counts[0] and not ended[0] else PROMPT
    return source, counts, ended, told if source.sampling.prompt_logprobs is not None else 1


def cut(dice: random.Random, source: EngineCoreRequest, counts: list[int], ended: list[bool], prompt_end: int) -> list[Part]:
    """The run in messages of two engines to three attachments, some parts more than once, in any order."""
    messages = []
    for _ in range(2):  # the second engine repeats what it likes
        whole = not messages
        borders = sorted({1, prompt_end, *(dice.randint(1, prompt_end) for _ in range(2))})
        pieces: list[dict[str, list[object]]] = [
            {"prompt_logprobs": [span]} for span in itertools.pairwise(borders) if whole or dice.random() < 0.4
        ]
        rows = [(choice, offset) for choice, count in enumerate(counts) for offset in range(count)]
        while rows:
            taken = [rows.pop(0) for _ in range(dice.randint(1, len(rows)))]
            if whole or dice.random() < 0.4:
                pieces.append({"rows": list(taken)})
        pieces += [
            {"ends": [(choice, counts[choice], FinishReason.LENGTH)]}
            for choice, is_over in enumerate(ended)
            if is_over and (whole or dice.random() < 0.4)
        ]
        for number, piece in enumerate(pieces):
            client, handle = dice.choice(ATTACHMENTS)
            wants = source.sampling.logprobs is not None
            messages.append(Message(client, handle, number, logprobs=wants, incarnation=1 + (not whole), **piece).build())  # type: ignore[arg-type]
    messages += dice.choices(messages, k=2) if messages else []
    dice.shuffle(messages)
    return messages


@settings(max_examples=150, deadline=None)
@given(run=runs(), seed=st.integers(0, 1 << 32))
def test_any_cut_of_a_run_folds_to_the_same(run: tuple[EngineCoreRequest, list[int], list[bool], int], seed: int) -> None:
    source, counts, ended, prompt_end = run
    folded = fold(source, cut(random.Random(seed), source, counts, ended, prompt_end), ATTACHMENTS)
    handle = source.handle
    for choice, (count, got) in enumerate(zip(counts, folded.choices, strict=True)):
        assert got.token_ids.tolist() == [token(choice, offset) for offset in range(count)]
        wanted = source.sampling.logprobs is not None
        assert got.logprobs == [logprobs_of(handle, choice, offset) for offset in range(count) if wanted]
        assert got.end == (end_of(handle, choice, count) if ended[choice] else None)
    assert told(folded) == told(fold(source, cut(random.Random(0), *run), ATTACHMENTS))
    ranks = [rank for part in folded.prompt_logprobs for rank in decode_column(part.ranks).tolist()]
    assert ranks == list(range(1, prompt_end)) and all(part.handle == handle for part in folded.prompt_logprobs)
    assert (folded.num_cached_tokens, folded.times.first_token) == ((4, 4.0) if any(ended) else (0, 0.0))


@settings(max_examples=50, deadline=None)
@given(run=runs(), seed=st.integers(0, 1 << 32))
def test_a_journal_may_be_regrouped_before_it_is_folded(
    run: tuple[EngineCoreRequest, list[int], list[bool], int], seed: int
) -> None:
    """As an engine does that continues many requests; and as one reads what a checkpoint stored, which names no API server."""
    source = run[0]
    parts = cut(random.Random(seed), *run)
    regrouped: list[Part] = []
    for incarnation in (1, 2):
        journal = by_attachment(part for part in parts if part[1].incarnation == incarnation)
        regrouped += [(client, rows) for (client, _), rows in journal.items()]
    own = [(None, rows) for client, rows in regrouped if (client, _handle(rows)) in ATTACHMENTS]
    expected = told(fold(source, parts, ATTACHMENTS))
    assert told(fold(source, regrouped, ATTACHMENTS)) == expected
    assert told(fold(source, own, [])) == expected


def _handle(rows: EngineCoreOutputs) -> int:
    """The one handle of a message."""
    entries = [entry.handle for entry in (*rows.logprobs, *rows.prompt_logprobs, *rows.finished)]
    (handle,) = {*entries, *decode_column(rows.handles, np.int64).tolist()}
    return handle


def test_nothing_told_is_nothing_folded() -> None:
    assert by_attachment([]) == {}
    folded = fold(make_source(n=2), [], ATTACHMENTS, num_cached_tokens=16, times=RequestTimes(1.0, 2.0))
    assert [(choice.token_ids.tolist(), choice.end) for choice in folded.choices] == [([], None), ([], None)]
    assert (folded.num_cached_tokens, folded.times) == (16, RequestTimes(1.0, 2.0))


def test_a_hole_cuts_the_choice_and_no_other() -> None:
    rows = [(0, 0), (0, 1), (0, 3), (0, 4), (1, 0), (1, 1)]
    ends = [(0, 5, FinishReason.LENGTH), (1, 2, FinishReason.LENGTH)]
    folded = fold(make_source(n=2, logprobs=0), [Message("api:1", 7, 1, rows, ends=ends, logprobs=True).build()], ATTACHMENTS)
    assert folded.choices[0].token_ids.tolist() == [0, 1] and [each.offset for each in folded.choices[0].logprobs] == [0, 1]
    assert folded.choices[0].end is None, "sampling finds this end again"
    assert folded.choices[1].token_ids.tolist() == [1000, 1001] and folded.choices[1].end == end_of(9, 1, 2)


def test_a_token_without_its_logprobs_is_a_hole() -> None:
    parts = [Message("api:1", 7, 1, [(0, 0)], logprobs=True).build(), Message("api:1", 7, 2, [(0, 1)]).build()]
    assert fold(make_source(logprobs=0), parts, ATTACHMENTS).choices[0].token_ids.tolist() == [0]
    assert fold(make_source(), parts, ATTACHMENTS).choices[0].token_ids.tolist() == [0, 1]


def test_a_hole_in_the_prompt_logprobs_cuts_all_of_the_first_choice() -> None:
    parts = [Message("api:1", 7, 1, [(0, 0), (1, 0)], [(1, 5), (7, PROMPT)]).build()]
    folded = fold(make_source(n=2, prompt_logprobs=1), parts, ATTACHMENTS)
    assert [part.end for part in folded.prompt_logprobs] == [5]
    assert [choice.token_ids.tolist() for choice in folded.choices] == [[], [1000]]


def test_a_stop_string_behind_a_hole_is_kept_for_when_the_tokens_are_there_again() -> None:
    client, message = Message("api:1", 7, 1, [(0, 0), (0, 2)], ends=[(0, 3, FinishReason.STOP)]).build()
    message.finished = [msgspec.structs.replace(end, stop_reason="###") for end in message.finished]
    (choice,) = fold(make_source(), [(client, message)], ATTACHMENTS).choices
    assert choice.token_ids.tolist() == [0]
    assert choice.end is not None and (choice.end.stop_reason, choice.end.num_tokens) == ("###", 3)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_an_end_that_sampling_does_not_find_again_stands(reason: FinishReason) -> None:
    rows = [(0, 0), (0, 2)]
    folded = fold(make_source(prompt_logprobs=1), [Message("api:1", 7, 1, rows, ends=[(0, 3, reason)]).build()], ATTACHMENTS)
    (choice,) = folded.choices
    assert choice.end is not None and (choice.end.reason, choice.end.num_tokens) == (reason, 0)
    assert not len(choice.token_ids)


def test_tokens_behind_a_stop_string_are_no_output() -> None:
    rows = [(0, offset) for offset in range(6)]
    client, message = Message("api:1", 7, 1, rows, ends=[(0, 4, FinishReason.STOP)]).build()
    message.finished = [msgspec.structs.replace(end, stop_reason="###") for end in message.finished]
    (choice,) = fold(make_source(), [(client, message)], ATTACHMENTS).choices
    assert choice.token_ids.tolist() == [0, 1, 2, 3]
    assert choice.end is not None and choice.end.stop_reason == "###"


def test_the_oldest_engine_is_believed_where_engines_differ() -> None:
    old = Message("api:1", 7, 5, [(0, 0)], logprobs=True).build()
    client, new = Message("api:1", 7, 1, [(0, 0), (0, 1)], incarnation=2, logprobs=True).build()
    new.token_ids = encode_column(decode_column(new.token_ids) + 100)
    for parts in ([old, (client, new)], [(client, new), old]):
        assert fold(make_source(), parts, ATTACHMENTS).choices[0].token_ids.tolist() == [0, 101]
