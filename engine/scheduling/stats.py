"""Counters of the scheduler, from the engine's start."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from engine.protocol import ITERATION_TOKENS_BOUNDS, EngineStats
from engine.scheduling.request import Request


class SchedulerStatistics:
    def __init__(self) -> None:
        self.counters = EngineStats()
        self._iterations = [0] * (len(ITERATION_TOKENS_BOUNDS) + 1)  # steps by size; not cumulative

    def step_planned(self, num_tokens: int) -> None:
        """Counts steps that compute something."""
        if num_tokens:
            self.counters.steps += 1
            self.counters.scheduled_tokens += num_tokens
            self.counters.iteration_tokens_sum += num_tokens
            self._iterations[bisect_left(ITERATION_TOKENS_BOUNDS, num_tokens)] += 1

    def finished(self, request: Request) -> None:
        counts, reason = self.counters.finished, str(request.finish_reason)
        counts[reason] = counts.get(reason, 0) + 1

    def snapshot(self, **gauges: int | float) -> EngineStats:
        cumulative, buckets = 0, []
        for count in self._iterations:
            cumulative += count
            buckets.append(cumulative)
        return msgspec.structs.replace(
            self.counters, finished=dict(self.counters.finished), iteration_tokens_buckets=buckets, **gauges
        )
