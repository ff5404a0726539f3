"""The engine's side of the workers: one step handed to all ranks, one answer back. Torch-free.

`uni` runs the one rank in this process, `mp` a process a rank. Either ends for good at its first failure: the reason stays, and
every later call raises it again.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import wait
from queue import SimpleQueue
from typing import NoReturn, TypeVar

from gpu.config import Capacity, WorkerConfig
from gpu.errors import UnsupportedConfiguration
from gpu.plan import ModelRunnerOutput, SchedulerOutput, decode_output, encode
from gpu.rank_process import CERTAIN, KILL_SECONDS, RankProcess, Trouble
from gpu.worker import (
    Allocated,
    AllocateKV,
    Command,
    CompileGrammar,
    Execute,
    Failed,
    GrammarCompiled,
    Load,
    Loaded,
    Logged,
    Progress,
    Report,
    Runner,
    decode_report,
    describe,
    encode_command,
    is_permanent,
    make_runner,
)

VERDICT_SECONDS = 0.2  # how long after a first failure other ranks' reports may still name an earlier cause
LOADING = "while loading"  # what the workers do, as the end of a sentence
STOP_SECONDS = 5.0  # for a worker to end by itself at shutdown

logger = logging.getLogger(__name__)
ReplyT = TypeVar("ReplyT", Loaded, Allocated)


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

    @classmethod
    def make(cls, config: WorkerConfig) -> Executor:
        """The executor that the configuration names. Raises UnsupportedConfiguration for `uni` with more than one rank."""
        if config.parallel.distributed_executor_backend == "mp":
            return MultiprocExecutor(config)
        if config.parallel.tensor_parallel_size > 1:
            raise UnsupportedConfiguration("uni runs one rank: --tensor-parallel-size above 1 needs mp")
        return UniProcExecutor(config)

    def launch(self) -> None:
        """Has the workers begin and returns at once, so that the caller can do other things until `start`, which waits for them
        and launches them unless that was done. Raises WorkerError."""
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


class Compilation:
    """A grammar on its way through all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self.done: Future[str] = Future()
        self.why_not = ""
        self._num_left = num_ranks

    def note(self, why_not: str) -> bool:
        """A rank has answered; True: it was the last one."""
        self.why_not = self.why_not or why_not
        self._num_left -= 1
        return self._num_left == 0


class MultiprocExecutor(Executor):
    """A process a rank. Every rank gets every step, rank 0 answers.

    One thread starts the processes, hears their reports and sees their deaths; `submit` and `collect` use the channels of steps
    directly. When a rank fails, the others may wait in a collective for ever. So the thread ends them at once
    and closes the channels, which wakes a caller that waits in `collect`.
    """

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._ranks: list[RankProcess] = []
        self._replies: SimpleQueue[tuple[int, Report] | None] = SimpleQueue()  # None: there will be no more
        self._steps: deque[int] = deque()  # submitted, not collected
        self._compilations: dict[str, Compilation] = {}  # by grammar
        self._compiling = threading.Lock()
        self._phase = LOADING
        self._watcher: threading.Thread | None = None
        self._shutdown_lock = threading.Lock()
        self._sending = threading.Lock()  # held while a channel is used, so that it is not closed meanwhile
        self._receiving = threading.Lock()

    def launch(self) -> None:
        self.check_health()
        if self._watcher is not None:
            raise RuntimeError("the executor was launched already")
        watcher = threading.Thread(target=self._watch, name="workers", daemon=True)
        watcher.start()
        self._watcher = watcher
        atexit.register(self.shutdown)

    def start(self, progress: Callable[[float], None] | None = None) -> Capacity:
        self.check_health()
        if self._phase != LOADING:
            raise RuntimeError("the executor was started already")
        if self._watcher is None:
            self.launch()
        try:
            loaded = self._gather(Loaded, progress)
        except BaseException:
            self.shutdown()
            raise
        available = min(reply.capacity.available_kv_bytes for reply in loaded)
        self.capacity = replace(loaded[0].capacity, available_kv_bytes=available)
        self._phase = "while idle"
        return self.capacity

    def allocate_kv(self, num_blocks: int, max_model_len: int) -> None:
        self._check_started()
        self._phase = "while allocating the KV cache"
        self._send(AllocateKV(num_blocks, max_model_len))
        self._gather(Allocated)
        self._phase = "while idle"

    def submit(self, plan: SchedulerOutput) -> None:
        self._check_started()
        command = Execute(encode(plan))
        self._steps.append(plan.step)
        self._send(command)

    def compile_grammar(self, grammar: str) -> Future[str]:
        self._check_started()
        with self._compiling:
            compilation = self._compilations.get(grammar)
            if compilation is None:
                compilation = self._compilations[grammar] = Compilation(len(self._ranks))
                self._send(CompileGrammar(grammar))
        return compilation.done

    def collect(self) -> ModelRunnerOutput:
        self.check_health()
        if not self._steps:
            raise RuntimeError("no step was submitted")
        payload = self._receive()
        if payload is None:
            self._raise_failure()
        output = decode_output(payload)
        step = self._steps.popleft()
        if output.step != step:
            raise RuntimeError(f"rank 0 answered step {output.step} where step {step} was due")
        return output

    def shutdown(self) -> None:
        self._keep(WorkerError("the executor was shut down"))
        watcher = self._watcher
        if watcher is None:
            return
        with self._shutdown_lock:
            atexit.unregister(self.shutdown)
            for rank in self._ranks:
                rank.hang_up()
            grace = 0.0 if self._phase == LOADING else STOP_SECONDS
            for number, seconds in ((0, grace), (signal.SIGTERM, KILL_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
                for rank in self._ranks if number else ():
                    rank.process.send_signal(number)
                watcher.join(seconds)
                if not watcher.is_alive():
                    break
            else:
                logger.error("worker processes %s do not end", [rank.process.pid for rank in self._ranks])
            for rank in self._ranks:
                rank.hang_up(socket.SHUT_RDWR)
            with self._sending, self._receiving:
                for rank in self._ranks:
                    rank.commands.close()

    def stopped_ranks(self) -> list[str]:
        return [f"rank {rank.index} (process {rank.process.pid})" for rank in self._ranks if rank.is_stopped]

    def dump_stacks(self) -> bool:
        for rank in self._ranks:
            rank.dump_stacks()
        return bool(self._ranks)

    def _check_started(self) -> None:
        self.check_health()
        if self._watcher is None:
            raise RuntimeError("the executor was not started")

    def _send(self, command: Command) -> None:
        payload = encode_command(command)
        with self._sending:
            sent = all(rank.send(payload) for rank in self._ranks)
        if not sent:
            self._raise_failure()

    def _receive(self) -> bytes | None:
        """None when rank 0 is gone."""
        with self._receiving, suppress(EOFError, OSError):
            return self._ranks[0].commands.recv_bytes()
        return None

    def _gather(self, kind: type[ReplyT], progress: Callable[[float], None] | None = None) -> list[ReplyT]:
        """A reply of `kind` from every rank, in the ranks' order."""
        num_ranks = self.config.parallel.tensor_parallel_size
        fractions = [0.0] * num_ranks
        replies: dict[int, ReplyT] = {}
        while len(replies) < num_ranks:
            answer = self._replies.get()
            if answer is None:
                self._raise_failure()
            index, report = answer
            if isinstance(report, kind):
                replies[index] = report
            elif isinstance(report, Progress) and progress is not None and report.fraction > fractions[index]:
                least = min(fractions)
                fractions[index] = report.fraction
                if min(fractions) > least:
                    progress(min(fractions))
        return [replies[index] for index in range(num_ranks)]

    def _raise_failure(self) -> NoReturn:
        """Raises the failure behind a lost channel. The watching thread knows it at once, or very soon."""
        self._failed.wait(VERDICT_SECONDS + 2 * KILL_SECONDS)
        self.check_health()
        raise WorkerError("a worker closed its channel")

    # What follows runs on the watching thread.

    def _watch(self) -> None:
        try:
            self._start_ranks()
            self._hear()
        except Exception as error:
            logger.exception("the thread that watches the workers failed")
            self._end(f"the workers could not be started or watched: {describe(error)}")
            for rank in self._ranks:
                rank.process.wait()
        finally:
            self._replies.put(None)

    def _start_ranks(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited: Ctrl-C must not hit a worker before it ignores it
        num_ranks = self.config.parallel.tensor_parallel_size
        # The ranks meet in a file without a name: no port to race for, nothing to leave behind.
        rendezvous = os.memfd_create("headrace-rendezvous") if num_ranks > 1 else None
        try:
            init_method = "" if rendezvous is None else f"file:///proc/self/fd/{rendezvous}"
            command = encode_command(Load(self.config, init_method, logging.getLogger("gpu").getEffectiveLevel()))
            for index in range(num_ranks):
                rank = RankProcess(index, num_ranks, rendezvous)
                self._ranks.append(rank)
                if self._failure is not None:  # shut down meanwhile
                    rank.process.kill()
                rank.send(command)
        finally:
            if rendezvous is not None:
                os.close(rendezvous)

    def _hear(self) -> None:
        """Until every rank has ended."""
        ranks = {rank.reports: rank for rank in self._ranks}
        verdict_at = math.inf
        while ranks:
            timeout = None if self._failure is not None or verdict_at == math.inf else max(0.0, verdict_at - time.monotonic())
            ready = wait(list(ranks), timeout)
            for reports in [reports for reports in ranks if reports in ready]:
                if not self._take_report(ranks[reports]):
                    del ranks[reports]
            troubles = [rank.trouble for rank in self._ranks if rank.trouble is not None]
            if self._failure is None and troubles:
                verdict_at = min(verdict_at, time.monotonic() + VERDICT_SECONDS)
                cause = min(troubles)
                if cause.when == CERTAIN or len(troubles) == len(self._ranks) or time.monotonic() >= verdict_at:
                    self._end(cause.text, cause.permanent)

    def _take_report(self, rank: RankProcess) -> bool:
        """False at the end of file, the rank's end."""
        try:
            report = decode_report(rank.reports.recv_bytes())
        except (EOFError, OSError):
            rank.reap(self._doing())
            return False
        if isinstance(report, Failed):
            reason = f"rank {rank.index} failed {report.doing}: {report.reason}"
            rank.trouble = Trouble(report.when, reason, report.permanent)
        elif isinstance(report, Logged):
            rank.log(report)
        elif isinstance(report, GrammarCompiled):
            self._note_compiled(report)
        else:
            self._replies.put((rank.index, report))
        return True

    def _note_compiled(self, report: GrammarCompiled) -> None:
        with self._compiling:
            compilation = self._compilations[report.grammar]
            is_last = compilation.note(report.why_not)
            if is_last:
                del self._compilations[report.grammar]
        if is_last:
            compilation.done.set_result(compilation.why_not)

    def _end(self, reason: str, permanent: bool = False) -> None:
        for rank in self._ranks:
            rank.process.kill()
            rank.hang_up(socket.SHUT_RDWR)
        self._fail(WorkerError(reason, permanent))
        self._replies.put(None)

    def _doing(self) -> str:
        with suppress(IndexError):
            return f"in step {self._steps[0]}"
        return self._phase
