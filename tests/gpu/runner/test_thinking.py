"""A thinking budget by what it does to draws: nothing before it is spent, then the closing mark, nothing once reasoning is over."""

from __future__ import annotations

import numpy as np
import pytest

from gpu.plan import SamplingParams, ThinkingBudget
from gpu.runner.thinking import MOST_BLANKS
from tests.gpu.runner.test_sampler import VOCAB, greedy, random_logits, sample

OPENING, CLOSING = 7, 8


def limited(budget: int, is_open: bool = False) -> SamplingParams:
    return greedy(thinking=ThinkingBudget(budget, OPENING, CLOSING, is_open))


@pytest.mark.parametrize(
    ("params", "output", "is_ended"),
    [
        (limited(3), [], False),
        (limited(3), [20, 21, 22, 23, 24], False),  # it does not reason
        (limited(3), [OPENING, 20, 21], False),
        (limited(3), [OPENING, 20, 21, 22], True),
        (limited(3), [OPENING, 20, 21, 22, 23], True),
        (limited(3), [20, OPENING, 20, 21, 22], True),  # a blank before
        (limited(3), [20] * MOST_BLANKS + [OPENING, 20, 21, 22], True),
        (limited(3), [20] * MOST_BLANKS + [21, OPENING, 20, 21, 22], False),  # of the content
        (limited(3), [OPENING, 20, 21, 22, CLOSING], False),
        (limited(3), [OPENING, CLOSING, 20, 21, 22, 23], False),
        (limited(0), [OPENING], True),
        (limited(0, is_open=True), [], True),
        (limited(2, is_open=True), [20], False),
        (limited(2, is_open=True), [20, 21], True),
        (limited(2, is_open=True), [20, CLOSING, 21, OPENING, 20, 21, 22], False),
    ],
)
def test_reasoning_is_ended_when_its_budget_is_spent(params: SamplingParams, output: list[int], is_ended: bool) -> None:
    logits = random_logits(1)
    best = int(logits.argmax())
    assert best not in (OPENING, CLOSING)
    assert sample(logits, (params, output)).token_ids.tolist() == [CLOSING if is_ended else best]


def test_the_end_is_certain_whatever_else_is_asked_for_and_of_its_row_alone() -> None:
    logits = random_logits(3)
    thinking = ThinkingBudget(1, OPENING, CLOSING, True)
    more = SamplingParams(
        thinking=thinking,
        temperature=1.5,
        top_k=1,
        repetition_penalty=9.0,
        logit_bias={CLOSING: -100.0},
        bad_words_token_ids=[[CLOSING]],
        min_tokens=9,
        stop_token_ids=[CLOSING],
        logprobs=0,
    )
    free = logits.argmax(1).tolist()
    sampled = sample(logits, (greedy(), [20]), (more, [20]), (greedy(), [20]))
    assert sampled.token_ids.tolist() == [free[0], CLOSING, free[2]]
    assert not sampled.failed
    (told,) = sampled.logprobs
    assert np.isfinite(told.logprobs).all(), "raw logprobs are the model's"


def test_marks_that_the_model_does_not_have_fail_the_row_alone() -> None:
    from tests.gpu.runner.test_sampler import make_batch

    batch = make_batch((greedy(thinking=ThinkingBudget(1, 1, VOCAB)), []), (greedy(), []))
    assert list(batch.failed_rows) == [0]
    assert "outside the vocabulary" in batch.failed_rows[0]
