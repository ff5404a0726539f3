"""The engine's core: schedule, execute, take in. No I/O but the executor, no text, no clock but the one it is given."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from engine.config import EngineConfig
from engine.protocol import EngineCoreRequest, EngineStats, FinishReason
from engine.runtime.capacity import Limits, calibrated_budget, fit_kv_cache, step_cost, step_pace
from engine.runtime.folding import FoldedOutput
from engine.runtime.workers import make_executor
from engine.scheduling.request import Request, make_requests
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_outputs import StepOutputs
from gpu.executor import Executor
from gpu.plan import SchedulerOutput


class Unrunnable(ValueError):
    """A request that this engine can never run; the text says why."""


class EngineCore:
    """One model on its workers, and the requests it runs.

    The constructor starts the workers, unless it gets an `executor` that has, and returns when they are loaded, profiled and have
    their KV cache; it raises `DoesNotFit` for what the memory does not allow and the executor's `WorkerError` for a worker that
    fails, and leaves no process behind then.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[float], None] | None = None,
        clock: Callable[[], float] = time.time,
        executor: Executor | None = None,
    ) -> None:
        self.config = config
        self.clock = clock
        self.step_started: float | None = None  # monotonic; None while idle
        self.last_step_seconds = 0.0
        self.num_submitted = self.num_returned = 0  # steps
        self.step_forecast = 0.0  # seconds of the step that was submitted last; 0: nothing is known yet
        self.executor = executor or make_executor(config)
        max_num_seqs = self.executor.config.max_num_seqs
        try:
            self.capacity = self.executor.start(progress)
            cost = step_cost(config.scheduler, self.capacity)
            budget = calibrated_budget(self.executor.config.max_num_batched_tokens, cost)
            max_model_len, num_blocks = fit_kv_cache(config.model, config.cache, self.capacity)
            self.executor.allocate_kv(num_blocks, max_model_len)
        except BaseException:
            self.executor.shutdown()
            raise
        self._out: deque[SchedulerOutput] = deque()  # submitted, not taken in
        self._most_out = 2 if config.scheduler.async_scheduling and config.parallel.distributed_executor_backend == "mp" else 1
        self.limits = Limits(max_model_len, num_blocks, budget, max_num_seqs)
        self.scheduler = Scheduler(
            replace(config.scheduler, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs),
            config.cache.block_size,
            num_blocks,
            max_model_len,
            config.cache.enable_prefix_caching,
            cost,
            step_pace(cost, self.capacity),
        )

    def make_requests(
        self, source: EngineCoreRequest, enqueued: float, received: float, folded: FoldedOutput | None = None
    ) -> list[Request]:
        """The choices of a request, with the times at which it was put on the bus and taken from it (epoch seconds). They go on
        behind what is `folded`. Safe on any thread. Raises Unrunnable."""
        prompt = np.frombuffer(source.prompt_token_ids, dtype=np.int32)
        longest, vocab_size = self.limits.max_model_len - 1, self.capacity.vocab_size
        if len(prompt) > longest:
            raise Unrunnable(f"The prompt has {len(prompt)} tokens; this engine takes 1 to {longest}.")
        if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
            raise Unrunnable(f"The prompt has token ids outside 0 to {vocab_size - 1}.")
        requests = make_requests(source, prompt, enqueued, received)
        if folded is not None:
            folded.resume(requests)
        return requests

    def add_request(self, request: Request) -> None:
        self.scheduler.add_request(request, self.clock())

    def finish(
        self,
        request_id: str,
        choice: int = -1,
        reason: FinishReason = FinishReason.ABORT,
        keep: int = -1,
        stop_reason: str | None = None,
        error: str | None = None,
    ) -> None:
        """End a request (or one choice) from outside, as far as it lives. It comes in a step's outputs when its blocks are free."""
        self.scheduler.finish(request_id, choice, reason, keep, stop_reason, error, self.clock())

    def compile_grammar(self, grammar: str) -> Future[str]:
        """On the workers, beside the steps. The result is why it cannot be compiled, or "". Safe on any thread."""
        return self.executor.compile_grammar(grammar)

    def step(self) -> StepOutputs | None:
        """Plan and submit the next step, then take in the oldest one that is out. None when there is nothing to do.

        With asynchronous scheduling the workers run the step planned here while the engine takes in its predecessor and plans its
        successor. Workers append what they sample to their own rows, so a plan needs no token ids. Raises `WorkerError` when the
        workers are gone.
        """
        if not self.has_work:
            return None  # and no step has started: an idle engine is not a late one
        self.step_started = self.step_started or time.monotonic()
        while self.scheduler.has_work and len(self._out) < self._most_out:
            plan = self.scheduler.schedule(self.clock())
            if not plan.total_num_scheduled_tokens:
                if self._out:
                    break  # what is out must come back first
                self.step_started = None
                return self.scheduler.update_from_output(plan, None, self.clock())
            self.num_submitted += 1
            self.step_forecast = max(self.last_step_seconds, self.scheduler.step_forecast)
            self.executor.submit(plan)
            self._out.append(plan)
        return self._take_in_oldest() if self._out else None

    def _take_in_oldest(self) -> StepOutputs:
        output = self.executor.collect()
        outputs = self.scheduler.update_from_output(self._out.popleft(), output, self.clock())
        self.num_returned += 1
        now = time.monotonic()
        self.last_step_seconds = now - (self.step_started or now)
        self.step_started = now if self._out else None
        return outputs

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._out)

    def stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        stats.last_step_seconds = self.last_step_seconds
        return stats

    def shutdown(self) -> None:
        self.executor.shutdown()
