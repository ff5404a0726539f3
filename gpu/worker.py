"""The process of one rank: it loads its shard, then executes the steps that the executor sends it. Imports torch only to load.

Two channels, both MessagePack: `commands` brings `Command`s in and takes rank 0's `ModelRunnerOutput`s back, `reports` takes
progress, log records and the reason of a failure to the executor. The end of file on `commands` is the order to stop; the executor
reads the end of file on `reports` as this process's death.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Protocol

import msgspec

from gpu.config import Capacity, WorkerConfig
from gpu.errors import CheckpointError, UnsupportedConfiguration
from gpu.plan import ModelRunnerOutput, SchedulerOutput, decode_plan, encode

# Without a step, after which the runner rests. A running stream has its next step after about 1 ms. A client that was answered has
# its next request computed after 6 ms or more, perhaps by another engine, whose prompt lacks the core that is kept here.
REST_SECONDS = 0.004
EXIT_SECONDS = 30.0  # how long a worker may outlive its executor's end of the channel, busy with a step or not

logger = logging.getLogger("gpu.worker")


class Load(msgspec.Struct, array_like=True, tag=0):
    config: WorkerConfig
    init_method: str  # how the ranks find each other (torch.distributed)
    log_level: int


class AllocateKV(msgspec.Struct, array_like=True, tag=1):
    num_blocks: int
    max_model_len: int


class Execute(msgspec.Struct, array_like=True, tag=2):
    plan: bytes  # SchedulerOutput as `gpu.plan.encode` makes it


class CompileGrammar(msgspec.Struct, array_like=True, tag=3):
    grammar: str


Command = Load | AllocateKV | Execute | CompileGrammar


class Progress(msgspec.Struct, array_like=True, tag=0):
    fraction: float  # of loading, 0 to 1


class Loaded(msgspec.Struct, array_like=True, tag=1):
    capacity: Capacity


class Allocated(msgspec.Struct, array_like=True, tag=2):
    pass


class Failed(msgspec.Struct, array_like=True, tag=3):
    doing: str  # "while loading", "in step 7"
    reason: str
    when: float  # CLOCK_MONOTONIC, one clock for all processes: of several ranks' failures the first is the cause
    permanent: bool = False  # a new start would fail the same way


class Logged(msgspec.Struct, array_like=True, tag=4):
    """A log record: the executor's process handles it, so that all of an engine's log has one format and one place."""

    name: str
    level: int
    message: str
    created: float  # seconds since the epoch


class GrammarCompiled(msgspec.Struct, array_like=True, tag=5):
    grammar: str
    why_not: str  # "": it is compiled


Report = Progress | Loaded | Allocated | Failed | Logged | GrammarCompiled

_encoder = msgspec.msgpack.Encoder()
encode_command: Callable[[Command], bytes] = _encoder.encode
encode_report: Callable[[Report], bytes] = _encoder.encode
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode


class Runner(Protocol):
    """The interface of `gpu.runner.runner.ModelRunner` and `gpu.stand_in.runner.StandInRunner`."""

    def load(self, progress: Callable[[float], None]) -> None: ...
    def capacity(self) -> Capacity: ...
    def allocate_kv(self, num_blocks: int, max_model_len: int) -> None: ...
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput: ...
    def compile_grammar(self, grammar: str) -> Future[str]: ...
    def rest(self) -> None: ...


def make_runner(config: WorkerConfig, rank: int, init_method: str) -> Runner:
    """The runner of one rank, not loaded yet; joins the ranks' group, hence returns when all ranks have called it.

    Raises CheckpointError, and UnsupportedConfiguration for options that this machine cannot serve.
    """
    if config.model.load_format == "null":
        from gpu.stand_in.null import NullRunner

        return NullRunner(config, rank)
    if config.model.load_format == "scripted":
        from gpu.stand_in.scripted import ScriptedRunner

        return ScriptedRunner(config, rank)

    import torch

    from gpu.checkpoint.weights import DummyCheckpoint, open_checkpoint
    from gpu.distributed import init_group
    from gpu.runner.runner import ModelRunner

    checkpoint = open_checkpoint(config.model.model)
    if config.model.load_format == "dummy":
        checkpoint = DummyCheckpoint(checkpoint.config, config.model.seed)
    use_cuda = config.model.device == "cuda" or (config.model.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        num_ranks, num_gpus = config.parallel.tensor_parallel_size, torch.cuda.device_count()
        if num_gpus < num_ranks:
            raise UnsupportedConfiguration(f"each rank takes a GPU of its own: {num_ranks} wanted, torch finds {num_gpus}")
        torch.cuda.set_device(device)
    group = init_group(rank, config.parallel.tensor_parallel_size, init_method, device)
    return ModelRunner(config, checkpoint, device, group)


def leave_group() -> None:
    """Ends this rank's torch.distributed group, if it is in one."""
    if "torch" in sys.modules:
        import torch.distributed

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def describe(error: BaseException) -> str:
    """An exception as a reason; errors that are meant for people speak for themselves."""
    if is_permanent(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def is_permanent(error: BaseException) -> bool:
    """The checkpoint or the configuration is at fault, which no new start mends."""
    return isinstance(error, CheckpointError | UnsupportedConfiguration)


class Worker:
    def __init__(self, rank: int, commands: Connection, reports: Connection) -> None:
        self.rank = rank
        self.commands = commands
        self.reports = reports
        self._report_lock = threading.Lock()
        self._inbox: SimpleQueue[Command | None] = SimpleQueue()
        self._told_to_stop = threading.Event()
        self._runner: Runner | None = None
        self._doing = "while loading"
        self._busy = False  # with steps

    def run(self) -> int:
        """Obeys until told to stop or until something fails; the process's exit status."""
        logging.getLogger().addHandler(_ReportHandler(self))
        threading.Thread(target=self._receive, name="commands", daemon=True).start()
        try:
            while (command := self._next()) is not None and not self._told_to_stop.is_set():
                self._obey(command)
        except Exception as error:
            if self._told_to_stop.is_set():
                return 0
            # At once, before ranks that need this one fail too.
            self.report(Failed(self._doing, describe(error), time.monotonic(), is_permanent(error)))
            if not is_permanent(error):
                logger.exception("rank %d failed %s", self.rank, self._doing)
            return 1
        leave_group()
        return 0

    def _next(self) -> Command | None:
        """The next command; the runner rests when none comes for a while."""
        if self._busy:
            try:
                return self._inbox.get(timeout=REST_SECONDS)
            except Empty:
                self._busy = False
                assert self._runner is not None
                self._runner.rest()
        return self._inbox.get()

    def report(self, report: Report) -> None:
        payload = encode_report(report)
        with self._report_lock:
            self.reports.send_bytes(payload)

    def _obey(self, command: Command) -> None:
        if isinstance(command, Load):
            self._runner = self._load(command)
            return
        assert self._runner is not None, "Load is the first command"
        if isinstance(command, Execute):
            self._busy = True
            plan = decode_plan(command.plan)
            self._doing = f"in step {plan.step}"
            output = self._runner.execute(plan)
            if self.rank == 0:
                self.commands.send_bytes(encode(output))
        elif isinstance(command, CompileGrammar):
            compiled, grammar = self._runner.compile_grammar(command.grammar), command.grammar
            compiled.add_done_callback(lambda done: self.report(GrammarCompiled(grammar, done.result())))
        else:
            self._doing = "while allocating the KV cache"
            self._runner.allocate_kv(command.num_blocks, command.max_model_len)
            self.report(Allocated())

    def _load(self, command: Load) -> Runner:
        logging.getLogger().setLevel(command.log_level)
        times = [time.perf_counter()]
        runner = make_runner(command.config, self.rank, command.init_method)
        gc.freeze()  # what was imported, hundreds of thousands of objects, lives as long as the process
        times.append(time.perf_counter())
        runner.load(lambda fraction: self.report(Progress(fraction)))
        times.append(time.perf_counter())
        capacity = runner.capacity()
        times.append(time.perf_counter())
        phases = [after - before for before, after in pairwise(times)]
        logger.info("rank %d is loaded: %.1f s imports, %.1f s weights, %.1f s profile", self.rank, *phases)
        gc.collect()
        gc.freeze()  # what loading made lives as long, too: no collection need look at it again
        self.report(Loaded(capacity))
        return runner

    def _receive(self) -> None:
        """On its own thread, so that the executor's `submit` never waits for a step and its death is seen during one."""
        try:
            while True:
                self._inbox.put(decode_command(self.commands.recv_bytes()))
        except (EOFError, OSError):
            pass
        except msgspec.DecodeError as error:
            self.report(Failed("while it read a command", describe(error), time.monotonic()))
        self._told_to_stop.set()
        self._inbox.put(None)
        time.sleep(EXIT_SECONDS)
        os._exit(1)


class _ReportHandler(logging.Handler):
    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.worker.report(Logged(record.name, record.levelno, self.format(record), record.created))
        except OSError:  # the executor is gone, and with it the log
            pass
