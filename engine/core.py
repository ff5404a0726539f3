"""The engine's core: schedule, execute, take in. No I/O but the executor, no text, no clock but the one it is given."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import replace

from engine.config import EngineConfig, WorkerConfig
from engine.limits import Limits, calibrated_budget, fit_kv_cache, step_limits
from engine.outputs import StepOutputs
from engine.protocol import EngineStats, FinishReason
from engine.request import Request
from engine.scheduler import Scheduler
from gpu.executor import Executor


class EngineCore:
    """One model on its workers, and the requests it runs.

    The constructor starts the workers and returns when they are loaded, profiled and have their KV cache; it raises
    `DoesNotFit` for what the memory does not allow and the executor's `WorkerError` for a worker that fails, and leaves no process
    behind then.
    """

    def __init__(
        self, config: EngineConfig, progress: Callable[[float], None] | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.config = config
        self.clock = clock
        self.step_started: float | None = None  # monotonic; None while idle
        self.last_step_seconds = 0.0
        budget, max_num_seqs = step_limits(config.scheduler, *_device(config))
        worker_config = WorkerConfig(config.model, config.cache, config.parallel, max_num_seqs, budget)
        self.executor = Executor.make(worker_config)
        try:
            self.capacity = self.executor.start(progress)
            budget = calibrated_budget(config.scheduler, budget, self.capacity)
            max_model_len, num_blocks = fit_kv_cache(config.model, config.cache, self.capacity)
            self.executor.allocate_kv(num_blocks, max_model_len)
        except BaseException:
            self.executor.shutdown()
            raise
        self.limits = Limits(max_model_len, num_blocks, budget, max_num_seqs)
        self.scheduler = Scheduler(
            replace(config.scheduler, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs),
            config.cache.block_size,
            num_blocks,
            max_model_len,
            config.cache.enable_prefix_caching,
        )

    def add_request(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def finish(
        self,
        request_id: str,
        choice: int = -1,
        reason: FinishReason = FinishReason.ABORT,
        keep: int = -1,
        stop_reason: str | None = None,
    ) -> list[Request]:
        """End a request (or one choice) from outside. Returns what ended now; nothing when it is not held."""
        return self.scheduler.finish(request_id, choice, reason, keep, stop_reason, self.clock())

    def step(self) -> StepOutputs | None:
        """One step; None when there is nothing to do. Raises `WorkerError` when the workers are gone."""
        if not self.scheduler.has_work:
            return None
        self.step_started = started = time.monotonic()
        plan = self.scheduler.schedule(self.clock())
        self.executor.submit(plan)
        output = self.executor.collect()
        outputs = self.scheduler.update_from_output(plan, output, self.clock())
        self.step_started, self.last_step_seconds = None, time.monotonic() - started
        return outputs

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        stats.last_step_seconds = self.last_step_seconds
        return stats

    def shutdown(self) -> None:
        self.executor.shutdown()


def _device(config: EngineConfig) -> tuple[str, int, str]:
    """(device, memory in bytes, name) without loading torch; memory and name of the first GPU by nvidia-smi."""
    if config.model.device == "cpu" or config.model.load_format == "null":
        return "cpu", 0, ""
    try:
        query = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
        first = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ("cuda" if config.model.device == "cuda" else "cpu"), 0, ""
    mebibytes, name = first.split(",", 1)
    return "cuda", int(mebibytes) << 20, name.strip()
