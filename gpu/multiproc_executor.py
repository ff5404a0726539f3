"""The executor that runs each rank in a process of its own."""

from __future__ import annotations

import atexit
import logging
import math
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from queue import SimpleQueue
from typing import NoReturn, TypeVar

from gpu.config import Capacity, WorkerConfig
from gpu.executor import LOADING, Executor, WorkerError
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
    decode_report,
    describe,
    encode_command,
)

VERDICT_SECONDS = 0.2  # how long after a first failure other ranks' reports may still name an earlier cause
STOP_SECONDS = 5.0  # for a worker to end by itself at shutdown

logger = logging.getLogger(__name__)
ReplyT = TypeVar("ReplyT", Loaded, Allocated)


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
