"""The executor that computes in the engine's own process."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from gpu.config import Capacity, WorkerConfig
from gpu.executor import LOADING, Executor, WorkerError
from gpu.plan import ModelRunnerOutput, SchedulerOutput
from gpu.worker import Runner, describe, is_permanent, make_runner

logger = logging.getLogger(__name__)


class UniProcExecutor(Executor):
    """The only rank, in this process: steps are computed in `submit`, their failures raised by `collect`, as with processes."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._runner: Runner | None = None
        self._outputs: deque[ModelRunnerOutput] = deque()

    def start(self, progress: Callable[[float], None] | None = None) -> Capacity:
        self.check_health()
        with self._failing(LOADING):
            self._runner = make_runner(self.config, 0, "")
            self._runner.load(progress or (lambda fraction: None))
            self.capacity = self._runner.capacity()
        self.check_health()
        return self.capacity

    def allocate_kv(self, num_blocks: int, max_model_len: int) -> None:
        runner = self._started_runner()
        with self._failing("while allocating the KV cache"):
            runner.allocate_kv(num_blocks, max_model_len)
        self.check_health()

    def submit(self, plan: SchedulerOutput) -> None:
        runner = self._started_runner()
        with self._failing(f"in step {plan.step}"):
            self._outputs.append(runner.execute(plan))
            runner.rest()

    def compile_grammar(self, grammar: str) -> Future[str]:
        return self._started_runner().compile_grammar(grammar)

    def collect(self) -> ModelRunnerOutput:
        self.check_health()
        if not self._outputs:
            raise RuntimeError("no step was submitted")
        return self._outputs.popleft()

    def shutdown(self) -> None:
        self._keep(WorkerError("the executor was shut down"))
        self._runner = None  # and with it weights and KV
        self._outputs.clear()

    def _started_runner(self) -> Runner:
        self.check_health()
        if self._runner is None:
            raise RuntimeError("the executor was not started")
        return self._runner

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        """Turns an exception into the executor's failure and lets the runner go, memory and all: not even a traceback keeps it."""
        try:
            yield
        except Exception as error:
            if not is_permanent(error):
                logger.exception("rank 0 failed %s", doing)
            self._runner = None
            self._fail(WorkerError(f"rank 0 failed {doing}: {describe(error)}", is_permanent(error)))
