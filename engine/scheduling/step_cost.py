"""How long a step will take, predicted from what it computes: the tokens, and the context that each of them attends to."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_OBSERVED = 0.1  # share of the longest step; shorter ones tell more of the machine's moods than of the cost
WEIGHT = 0.2  # of one step in the pace
SLOWEST, FASTEST = 16.0, 0.25


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step = per step + per token * tokens + per context * (sum over tokens of the tokens before each).

    Measured by the workers (`gpu.runner.profile`). All zero: nothing is predicted, and no step is too long.
    """

    per_step: float = 0.0
    per_token: float = 0.0
    per_context: float = 0.0  # of one token that attends to one more

    def seconds(self, num_tokens: float, context: float) -> float:
        """Of one request's tokens behind `context` others."""
        return num_tokens * (self.per_token + self.per_context * (context + num_tokens / 2))

    def tokens_within(self, seconds: float, context: int) -> float:
        """How many tokens behind `context` others take so long; infinity where they take no time. The inverse of `seconds`."""
        if seconds <= 0:
            return 0.0
        linear = self.per_token + self.per_context * context
        if linear + self.per_context == 0:
            return math.inf
        # of per_context / 2 * n^2 + linear * n = seconds, in the form that does not cancel
        return 2 * seconds / (linear + math.sqrt(linear * linear + 2 * self.per_context * seconds))

    def scaled(self, factor: float) -> StepCost:
        return StepCost(self.per_step * factor, self.per_token * factor, self.per_context * factor)


NO_COST = StepCost()


class StepPace:
    """The cost as it is now: other processes may share the cores, which the workers did not know when they measured."""

    def __init__(self, cost: StepCost, max_seconds: float) -> None:
        self._measured = self.cost = cost
        self._least = LEAST_OBSERVED * max_seconds
        self._factor = 1.0

    def observe(self, predicted: float, seconds: float) -> None:
        """A step returned: what `cost` said of it, and what it took."""
        if self._measured is NO_COST or predicted < self._least or seconds <= 0:
            return
        change = 1 - WEIGHT + WEIGHT * seconds / predicted
        self._factor = min(SLOWEST, max(FASTEST, self._factor * change))
        self.cost = self._measured.scaled(self._factor)
