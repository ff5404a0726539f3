"""Counters of the scheduler, from the engine's start."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import msgspec

from engine.protocol import ITERATION_TOKENS_BOUNDS, STEP_SECONDS_BOUNDS, EngineStats
from engine.scheduling.request import Request


class SchedulerStatistics:
    def __init__(self) -> None:
        self.counters = EngineStats()
        self._iterations = [0] * (len(ITERATION_TOKENS_BOUNDS) + 1)  # steps by size; not cumulative
        self._durations = [0] * (len(STEP_SECONDS_BOUNDS) + 1)

    def step_planned(self, num_tokens: int) -> None:
        """Counts steps that compute something."""
        if num_tokens:
            self.counters.steps += 1
            self.counters.scheduled_tokens += num_tokens

    def step_returned(self, num_prompt_tokens: int, num_generated: int, seconds: float) -> None:
        """A step's size, as vLLM counts it: prompt tokens that it computed and tokens that it generated. And its time."""
        self.counters.step_seconds_sum += seconds
        self._durations[bisect_left(STEP_SECONDS_BOUNDS, seconds)] += 1
        self.counters.generation_tokens += num_generated
        if num_tokens := num_prompt_tokens + num_generated:
            self.counters.iteration_tokens_sum += num_tokens
            self._iterations[bisect_left(ITERATION_TOKENS_BOUNDS, num_tokens)] += 1

    def first_token(self, request: Request) -> None:
        """A prompt counts whole, once whatever its number of choices, when its first token is there."""
        if request.choice == 0:
            self.counters.prompt_tokens += request.num_prompt_tokens
            self.counters.prompt_tokens_cached += request.num_cached_tokens

    def finished(self, request: Request) -> None:
        counts, reason = self.counters.finished, str(request.finish_reason)
        counts[reason] = counts.get(reason, 0) + 1

    def snapshot(self, **gauges: int | float) -> EngineStats:
        return msgspec.structs.replace(
            self.counters,
            finished=dict(self.counters.finished),
            iteration_tokens_buckets=list(accumulate(self._iterations)),
            step_seconds_buckets=list(accumulate(self._durations)),
            **gauges,
        )
