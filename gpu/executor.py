"""The engine's side of the workers: one step handed to all ranks, one answer back. Torch-free.

`uni` runs the one rank in this process, `mp` a process a rank. Either ends for good at its first failure: the reason stays, and
every later call raises it again.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future

from gpu.config import Capacity, WorkerConfig
from gpu.plan import ModelRunnerOutput, SchedulerOutput

LOADING = "while loading"  # what the workers do, as the end of a sentence

logger = logging.getLogger(__name__)


class WorkerError(RuntimeError):
    """The workers have failed; the message is the reason. `permanent`: a new start would fail in the same way."""

    def __init__(self, reason: str, permanent: bool = False) -> None:
        super().__init__(reason)
        self.permanent = permanent


class Executor(ABC):
    """Runs steps in the order they are submitted. Workers may fail at any time; `check_health` tells, idle or not."""

    capacity: Capacity  # after `start`; available_kv_bytes is the least of all ranks

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self._failure: WorkerError | None = None
        self._failure_lock = threading.Lock()
        self._failed = threading.Event()

    def launch(self) -> None:
        """Has the workers begin and returns at once, so that the caller can do other things meanwhile. `start` waits for them, and
        launches them unless that was done. Raises WorkerError."""
        self.check_health()

    @abstractmethod
    def start(self, progress: Callable[[float], None] | None = None) -> Capacity:
        """Loads and profiles; tells `progress` 0 to 1, never less than before. Raises WorkerError, with no process left then."""

    @abstractmethod
    def allocate_kv(self, num_blocks: int, max_model_len: int) -> None:
        """Makes the KV cache on all ranks. Raises WorkerError."""

    @abstractmethod
    def submit(self, plan: SchedulerOutput) -> None:
        """Hands the step to all ranks; `mp` does not wait for it. Raises WorkerError."""

    @abstractmethod
    def compile_grammar(self, grammar: str) -> Future[str]:
        """Has all ranks compile it, beside the steps. The result is why it cannot be compiled, or ""; it never comes when the
        workers fail before. Raises WorkerError."""

    @abstractmethod
    def collect(self) -> ModelRunnerOutput:
        """Waits for the oldest step submitted. Raises WorkerError when a rank raised or died."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers; may be called again, and at any time. Bounded: a worker that does not listen is killed."""

    def stopped_ranks(self) -> list[str]:
        """Workers that live and do not run, because something stopped them (SIGSTOP), each as the start of a sentence."""
        return []

    def dump_stacks(self) -> bool:
        """Has workers in processes of their own write the stacks of their threads to stderr, soon; False: there are none."""
        return False

    def check_health(self) -> None:
        """Raises WorkerError when the workers failed or were shut down."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # else it would grow, and hold the frames of every call it ended

    def _keep(self, failure: WorkerError) -> bool:
        """False when there is an earlier one, which stays."""
        with self._failure_lock:
            if self._failure is not None:
                return False
            self._failure = failure
        self._failed.set()
        return True

    def _fail(self, failure: WorkerError) -> None:
        if self._keep(failure):
            logger.error("the workers have failed: %s", failure)
