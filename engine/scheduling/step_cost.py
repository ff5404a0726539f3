"""How long a step takes: predicted from the tokens that it computes and their contexts, corrected by how long steps took before."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_OBSERVED = 0.1  # share of the longest step; shorter ones tell more of the machine's moods than of the cost
FASTEST, SLOWEST = 1 / 64, 16.0  # of real seconds over predicted ones
MEAN_WEIGHT, DEVIATION_WEIGHT = 0.2, 0.25  # of the newest step
FIRST_DEVIATION = 0.1  # before any step was observed
LEAST_DEVIATION = 0.04  # of the mean: a calm machine may be disturbed in the next step
DEVIATIONS = 4  # that a step may be slower than the mean and still end in time


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step = per step + per token * tokens + per context * (sum over tokens of the tokens before each).

    Measured by a worker with one thread (`gpu.runner.profile`). All zero: nothing is predicted, and no step is too long.
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


NO_COST = StepCost()


class StepPace:
    """How much a step may cost to end in time, learned from real seconds over predicted ones.

    The real ones vary: other processes take time on the cores and in the memory. A step is planned for the mean ratio and some mean
    deviations more, both exponentially weighted, as TCP sets its timeout from round trips.

    Engines of a machine lend each other cores. A borrowed core may be gone in the next step, so a step is planned for the threads
    that the engine is sure of, and what borrowed ones made faster is not learned.
    """

    def __init__(self, max_seconds: float, sure_threads: int = 1) -> None:
        """`max_seconds`: of a step; infinity: any step is in time, and nothing is learned."""
        self._max_seconds = max_seconds
        self._sure_threads = sure_threads
        self._deviation = FIRST_DEVIATION
        self.mean = 1.0

    @property
    def affordable(self) -> float:
        """What a step may cost, in predicted seconds."""
        return self._max_seconds / (self.mean + DEVIATIONS * max(self._deviation, LEAST_DEVIATION * self.mean))

    def observe(self, cost: float, seconds: float, num_threads: int) -> None:
        """A step returned, which was predicted to take `cost` seconds and took `seconds` with so many threads."""
        if cost * self.mean < LEAST_OBSERVED * self._max_seconds:
            return
        borrowed = max(1.0, num_threads / self._sure_threads)
        ratio = min(SLOWEST, max(FASTEST, seconds * borrowed / cost))
        error = ratio - self.mean
        deviation = self._deviation + DEVIATION_WEIGHT * (abs(error) - self._deviation)
        self.mean += MEAN_WEIGHT * error
        self._deviation = min(deviation, self.mean)  # so that a step that has prompts is long enough to be observed
