"""Tells in the log when the KV cache is too small for its requests: some were preempted, and compute again what they had."""

from __future__ import annotations

import logging
import math

from engine.protocol import EngineStats
from engine.runtime.capacity import Limits

logger = logging.getLogger(__name__)

LEAST_INTERVAL = 60.0  # seconds between two warnings


class KVPressure:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._told_at = -math.inf
        self._told = 0  # preemptions, up to the last warning

    def look(self, stats: EngineStats, now: float) -> None:
        """Warns of preemptions since the last warning. `now`: a monotonic clock, in seconds."""
        num_new = stats.preemptions - self._told
        if not num_new or now - self._told_at < LEAST_INTERVAL:
            return
        self._told, self._told_at = stats.preemptions, now
        usable = self._limits.num_blocks - 1  # without the null block
        logger.warning(
            "the KV cache is too small for what runs: %d preemptions since the last warning (%d in all), %d of %d blocks in use, "
            "%d requests run and %d wait. Give it more memory with --kv-cache-memory-bytes or --gpu-memory-utilization, let fewer "
            "requests run with --max-num-seqs (now %d), or keep blocks free with --watermark; see docs/kv-pressure.md",
            num_new,
            stats.preemptions,
            usable - stats.num_free_blocks,
            usable,
            stats.num_running,
            stats.num_waiting,
            self._limits.max_num_seqs,
        )
