"""What each prompt gets of a step, and what a step is predicted to cost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.prompt_shares import PromptPart, share
from engine.scheduling.step_cost import NO_COST, StepCost
from engine.scheduling.step_draft import Room

COSTS = st.builds(StepCost, st.just(0.0), st.floats(1e-5, 1e-2), st.floats(0, 1e-5))


def shares(budget: int, *left: int, ranks: tuple[int, ...] = (), seconds: float = math.inf, cost: StepCost = NO_COST) -> list[int]:
    parts = [PromptPart(each, 0, 1 << 30, ranks[place] if ranks else 0) for place, each in enumerate(left)]
    share(parts, Room(budget, seconds, cost), 16)
    return [part.tokens for part in parts]


def test_all_have_what_they_want_where_it_fits() -> None:
    assert shares(100, 40, 60) == [40, 60]


def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    assert shares(512, 7900, 7900, 7900, 7900, 30) == [482, 0, 0, 0, 30]


def test_the_first_has_half_whatever_comes_behind_it() -> None:
    assert shares(100, 7900, *[40] * 20)[:4] == [50, 40, 10, 0]


def test_equally_long_ones_are_computed_one_after_the_other() -> None:
    assert shares(512, 7900, 7900) == [512, 0]
    assert shares(512, 300, 7900) == [300, 212]


def test_lower_ranks_come_before_shorter_ones() -> None:
    assert shares(100, 500, 80, 20, ranks=(1, 0, 1)) == [50, 50, 0]
    assert shares(200, 500, 80, 20, ranks=(1, 0, 1)) == [100, 80, 20]


def test_some_tokens_are_computed_though_there_is_no_time() -> None:
    assert shares(100, 80, 50, seconds=-1.0, cost=StepCost(per_token=1.0)) == [16, 0]


@given(cost=COSTS, seconds=st.floats(1e-3, 2.0), context=st.integers(0, 100_000))
def test_tokens_within_a_time_are_the_inverse_of_the_time_of_tokens(cost: StepCost, seconds: float, context: int) -> None:
    assert cost.seconds(cost.tokens_within(seconds, context), context) == pytest.approx(seconds)


@given(
    left=st.lists(st.integers(1, 10_000), min_size=1, max_size=8),
    contexts=st.lists(st.integers(0, 10_000), min_size=8, max_size=8),
    budget=st.integers(1, 2048),
    seconds=st.floats(0.01, 1.0),
    cost=COSTS,
)
def test_a_step_is_never_overdrawn_nor_left_empty(
    left: list[int], contexts: list[int], budget: int, seconds: float, cost: StepCost
) -> None:
    parts = [PromptPart(each, context, 1 << 30) for each, context in zip(left, contexts, strict=False)]
    share(parts, Room(budget, seconds, cost), least=16)
    tokens = [part.tokens for part in parts]
    assert 0 < sum(tokens) <= budget and all(0 <= part.tokens <= part.left for part in parts)
    spent = sum(cost.seconds(part.tokens, part.context) for part in parts)
    assert spent <= seconds * 1.001 or sum(tokens) <= 16


def test_many_requests_cost_the_sum_of_each() -> None:
    cost = StepCost(0.0, 1e-3, 1e-6)
    room = Room(1000, 1.0, cost)
    tokens, contexts = np.array([1, 20, 300]), np.array([500, 0, 7])
    room.take_all(tokens, contexts)
    assert room.tokens == 679
    assert room.seconds == pytest.approx(sum(map(cost.seconds, tokens.tolist(), contexts.tolist())))


@pytest.mark.parametrize(("seconds", "tokens"), [(1.0, [1, 4]), (0.1, [4, 0])])
def test_a_running_prompt_goes_on_beside_one_that_waits(seconds: float, tokens: list[int]) -> None:
    """Half of the time is too short for one of its tokens, and another has that time. The other may lack blocks that it holds."""
    parts = [PromptPart(9, 100, 64), PromptPart(4, 0, 64, waits=True)]
    share(parts, Room(64, seconds, StepCost(per_token=0.2, per_context=0.01)), 4)
    assert [part.tokens for part in parts] == tokens
