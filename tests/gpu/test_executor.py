"""The executor with real processes: what it answers, and what it leaves when something dies. Without a model, save at the end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from gpu.config import CacheConfig, ModelConfig, ParallelConfig, WorkerConfig
from gpu.executor import Executor, WorkerError
from gpu.executor_factory import executor_for
from gpu.multiproc_executor import MultiprocExecutor
from gpu.plan import Int32Array, ModelRunnerOutput, NewRequest, SamplingParams, SchedulerOutput
from gpu.stand_in.runner import ENVIRONMENT_VARIABLE
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
SECONDS = 10  # more than anything here may take on a busy machine; nothing waits as long when all is well

StartExecutor = Callable[..., Executor]


@pytest.fixture
def null_settings(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda settings: monkeypatch.setenv(ENVIRONMENT_VARIABLE, settings)


@pytest.fixture
def make_executor() -> Iterator[StartExecutor]:
    """Executors of the null runner, not started. After the test they leave no process, no open file and no shared memory."""
    before = _traces()
    executors: list[Executor] = []

    def make(backend: str = "mp", num_ranks: int = 1, **model: Any) -> Executor:
        executors.append(executor_for(_config(backend, num_ranks, **model)))
        return executors[-1]

    yield make
    for executor in executors:
        executor.shutdown()
    executors.clear()
    (processes, shared_memory, num_files), now = before, _traces()
    assert now[:2] == (processes, shared_memory)
    assert now[2] <= num_files, "files left open; fewer than before are other tests' business"


@pytest.fixture
def start_executor(make_executor: StartExecutor) -> StartExecutor:
    def start(backend: str = "mp", num_ranks: int = 1, **model: Any) -> Executor:
        executor = make_executor(backend, num_ranks, **model)
        executor.start()
        executor.allocate_kv(100, 1000)
        return executor

    return start


def _config(backend: str, num_ranks: int, **model: Any) -> WorkerConfig:
    return WorkerConfig(
        ModelConfig(**{"load_format": "null", "device": "cpu", **model}),
        CacheConfig(),
        ParallelConfig(num_ranks, distributed_executor_backend=backend, num_threads=1),
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )


def _traces() -> tuple[set[int], set[str], int]:
    gc.collect()  # what other tests have left behind is not to vanish meanwhile
    process = psutil.Process()
    return {child.pid for child in process.children(recursive=True)}, set(os.listdir("/dev/shm")), process.num_fds()


def _int32(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def _prefill(step: int = 0, seed: int = 7, row: int = 0, **sampling: Any) -> SchedulerOutput:
    block_ids = np.arange(1 + 40 * row, 41 + 40 * row, dtype=np.int32)
    request = NewRequest(row, _int32(5, 6, 7), 3, 0, block_ids, SamplingParams(**sampling), seed)
    return SchedulerOutput(step, [], [request], _int32(), _int32(), _int32(row), _int32(3), 3)


def _decode(step: int, row: int = 0) -> SchedulerOutput:
    return SchedulerOutput(step, [], [], _int32(), _int32(), _int32(row), _int32(1), 1)


def _run(executor: Executor, plan: SchedulerOutput) -> ModelRunnerOutput:
    executor.submit(plan)
    return executor.collect()


def _pids(executor: Executor) -> list[int]:
    return [process.pid for process in _processes(executor)]


def _processes(executor: Executor) -> list[subprocess.Popen[bytes]]:
    assert isinstance(executor, MultiprocExecutor)
    return [rank.process for rank in executor._ranks]


def _is_unwell(executor: Executor) -> bool:
    try:
        executor.check_health()
    except WorkerError:
        return True
    return False


def _is_gone(pid: int) -> bool:
    """A zombie counts as gone: the process that inherits the tests' orphans may not reap them."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# Answers


@pytest.mark.parametrize(("backend", "num_ranks"), [("uni", 1), ("mp", 1), ("mp", 3)])
def test_steps_give_the_tokens_of_the_row(start_executor: StartExecutor, backend: str, num_ranks: int) -> None:
    executor = start_executor(backend, num_ranks)
    outputs = [_run(executor, _prefill(logprobs=2, prompt_logprobs=1)), *(_run(executor, _decode(step)) for step in range(1, 6))]
    assert [output.step for output in outputs] == list(range(6))
    assert [output.rows.tolist() for output in outputs] == [[0]] * 6
    assert [output.token_ids.item() for output in outputs] == [21244, 34029, 25720, 25703, 45350, 12786]
    assert outputs[0].logprobs[0].token_ids.tolist() == [21244, 21244, 21245]
    assert outputs[0].prompt_logprobs[0].token_ids.tolist() == [6, 6, 7, 7]


def test_steps_may_be_submitted_ahead(start_executor: StartExecutor) -> None:
    executor = start_executor("mp", 2)
    executor.submit(_prefill(0))
    for step in range(1, 8):
        executor.submit(_decode(step))
    assert [executor.collect().step for _ in range(8)] == list(range(8))


def test_submit_returns_while_the_workers_compute(start_executor: StartExecutor, null_settings: Callable[[str], None]) -> None:
    """A plan larger than what a socket holds is taken in while the step before runs."""
    null_settings("step_seconds=1,max_model_len=1000000")
    executor = start_executor("mp", 2)
    executor.allocate_kv(70_000, 1_000_000)
    executor.submit(_prefill(0))
    long = NewRequest(1, np.zeros(1_000_000, np.int32), 1_000_000, 0, np.arange(2, 62_502, dtype=np.int32), SamplingParams(), 0)
    started = time.monotonic()
    executor.submit(SchedulerOutput(1, [], [long], _int32(), _int32(), _int32(1), _int32(64), 64))
    assert time.monotonic() - started < 0.9
    assert [executor.collect().rows.tolist() for _ in range(2)] == [[0], []]


def test_capacity_is_that_of_the_smallest_rank(make_executor: StartExecutor) -> None:
    fractions: list[float] = []
    executor = make_executor("mp", 3)
    capacity = executor.start(fractions.append)
    assert capacity == executor.capacity
    assert (capacity.max_model_len, capacity.vocab_size) == (8192, 49152)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_the_uni_backend_refuses_several_ranks() -> None:
    with pytest.raises(ValueError, match="tensor-parallel-size above 1 needs mp"):
        executor_for(_config("uni", 2))


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_misuse_of_an_executor_is_an_error(make_executor: StartExecutor, backend: str) -> None:
    executor = make_executor(backend)
    with pytest.raises(RuntimeError, match="not started"):
        executor.submit(_prefill())
    executor.start()
    with pytest.raises(RuntimeError, match="no step was submitted"):
        executor.collect()


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_workers_that_were_launched_are_waited_for(make_executor: StartExecutor, backend: str) -> None:
    executor = make_executor(backend)
    executor.launch()
    executor.start()
    executor.allocate_kv(100, 1000)
    executor.submit(_prefill())
    assert len(executor.collect().rows) == 1


def test_workers_that_fail_before_anybody_waits_tell_why(
    make_executor: StartExecutor, null_settings: Callable[[str], None]
) -> None:
    null_settings("fail_while=load,fail_rank=1")
    executor = make_executor("mp", 2)
    executor.launch()
    wait_for(lambda: executor._failure is not None, "the failure")
    with pytest.raises(WorkerError, match=r"^rank 1 failed while loading"):
        executor.start()


def test_workers_that_nobody_waits_for_end_with_the_executor(
    make_executor: StartExecutor, null_settings: Callable[[str], None]
) -> None:
    null_settings("load_seconds=60")
    executor = make_executor("mp", 2)
    executor.launch()
    wait_for(lambda: len(_pids(executor)) == 2, "start")
    pids = _pids(executor)
    executor.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_no_torch_on_the_engine_side_and_none_for_the_null_runner() -> None:
    script = (
        "import sys; from gpu.executor_factory import executor_for; from gpu.config import *;"
        "c = WorkerConfig(ModelConfig(load_format='null'), parallel=ParallelConfig(distributed_executor_backend='uni'));"
        "executor_for(c).start(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=60)


# Failures while loading


@pytest.mark.parametrize(("backend", "num_ranks", "failing"), [("uni", 1, 0), ("mp", 1, 0), ("mp", 3, 1)])
def test_an_exception_while_loading_is_raised_by_every_call(
    make_executor: StartExecutor, null_settings: Callable[[str], None], backend: str, num_ranks: int, failing: int
) -> None:
    null_settings(f"fail_while=load,fail_rank={failing}")
    executor = make_executor(backend, num_ranks)
    with pytest.raises(WorkerError, match=rf"^rank {failing} failed while loading: RuntimeError: failure while loading") as raised:
        executor.start()
    for later in (lambda: executor.allocate_kv(1, 1), lambda: executor.submit(_prefill()), executor.collect, executor.check_health):
        with pytest.raises(WorkerError) as again:
            later()
        assert again.value is raised.value and not raised.value.permanent


def test_a_worker_that_cannot_begin_tells_why(make_executor: StartExecutor, null_settings: Callable[[str], None]) -> None:
    null_settings("vocab=7")
    with pytest.raises(WorkerError, match="HEADRACE_NULL_RUNNER has no setting vocab"):
        make_executor("mp", 2).start()


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_a_model_that_is_not_there_is_a_permanent_failure(make_executor: StartExecutor, backend: str) -> None:
    with pytest.raises(WorkerError, match=r"^rank 0 failed while loading: there is no model at /nowhere") as raised:
        make_executor(backend, load_format="auto", model="/nowhere").start()
    assert raised.value.permanent


def test_a_worker_killed_while_loading_ends_the_start(make_executor: StartExecutor, null_settings: Callable[[str], None]) -> None:
    null_settings("load_seconds=60")
    executor = make_executor("mp", 3)

    def kill() -> None:
        wait_for(lambda: len(_pids(executor)) == 3, "start")
        os.kill(_pids(executor)[1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"^rank 1 was killed by signal 9 while loading"):
        executor.start()
    assert time.monotonic() - started < SECONDS
    killer.join()


def test_shutdown_while_loading(make_executor: StartExecutor, null_settings: Callable[[str], None]) -> None:
    """Another thread calls it, as a signal handler would; it does not wait for the load."""
    null_settings("load_seconds=60")
    executor = make_executor("mp", 2)
    errors: list[BaseException] = []

    def start() -> None:
        try:
            executor.start()
        except WorkerError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    wait_for(lambda: len(_pids(executor)) == 2, "start")
    executor.shutdown()
    thread.join(SECONDS)
    assert [str(error) for error in errors] == ["the executor was shut down"]


# Failures while running


@pytest.mark.parametrize(("backend", "num_ranks", "failing"), [("uni", 1, 0), ("mp", 1, 0), ("mp", 3, 0), ("mp", 3, 2)])
def test_an_exception_in_a_step_is_raised_by_every_call(
    start_executor: StartExecutor, null_settings: Callable[[str], None], backend: str, num_ranks: int, failing: int
) -> None:
    null_settings(f"fail_while=execute,fail_rank={failing},fail_step=2,step_seconds=0.02")
    executor = start_executor(backend, num_ranks)
    _run(executor, _prefill(0))
    _run(executor, _decode(1))
    with pytest.raises(WorkerError, match=rf"^rank {failing} failed in step 2: RuntimeError: failure in step 2") as raised:
        for step in range(2, 500):  # nobody waits for a rank that does not answer: its failure may be seen some steps later
            _run(executor, _decode(step))
    with pytest.raises(WorkerError) as again:
        executor.submit(_decode(3))
    assert again.value is raised.value and not raised.value.permanent


def test_a_plan_against_the_contract_of_rows_ends_the_group(start_executor: StartExecutor) -> None:
    executor = start_executor("mp", 2)
    executor.submit(_decode(0))
    with pytest.raises(WorkerError, match="tokens that are not known"):
        executor.collect()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_worker_killed_in_a_step_ends_the_wait_for_it(
    start_executor: StartExecutor, null_settings: Callable[[str], None], victim: int
) -> None:
    null_settings("step_seconds=60")
    executor = start_executor("mp", 3)
    pids = _pids(executor)
    executor.submit(_prefill(4))
    os.kill(pids[victim], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=rf"^rank {victim} was killed by signal 9 in step 4"):
        executor.collect()
    assert time.monotonic() - started < SECONDS
    wait_for(lambda: all(map(_is_gone, pids)), "the other ranks' end")


def test_a_worker_killed_while_idle_is_reported(start_executor: StartExecutor) -> None:
    executor = start_executor("mp", 2)
    _run(executor, _prefill())
    pids = _pids(executor)
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: _is_unwell(executor), "the failure")
    with pytest.raises(WorkerError, match=r"^rank 1 was killed by signal 9 while idle"):
        executor.check_health()
    with pytest.raises(WorkerError, match=r"^rank 1 was killed by signal 9 while idle"):
        executor.submit(_decode(1))
    wait_for(lambda: all(map(_is_gone, pids)), "the other rank's end")


# The end


@pytest.mark.parametrize(("backend", "num_ranks"), [("uni", 1), ("mp", 3)])
def test_shutdown_again_and_again(start_executor: StartExecutor, backend: str, num_ranks: int) -> None:
    executor = start_executor(backend, num_ranks)
    _run(executor, _prefill())
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(WorkerError, match=r"^the executor was shut down$"):
        executor.submit(_decode(1))
    with pytest.raises(WorkerError, match=r"^the executor was shut down$"):
        executor.start()


def test_shutdown_before_start(make_executor: StartExecutor) -> None:
    executor = make_executor("mp", 2)
    executor.shutdown()
    with pytest.raises(WorkerError, match=r"^the executor was shut down$"):
        executor.start()


def test_workers_end_by_themselves(start_executor: StartExecutor) -> None:
    executor = start_executor("mp", 2)
    processes = _processes(executor)
    executor.shutdown()
    assert [process.returncode for process in processes] == [0, 0]


def test_a_worker_that_does_not_listen_is_killed(start_executor: StartExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, it takes no order and no SIGTERM."""
    monkeypatch.setattr("gpu.multiproc_executor.STOP_SECONDS", 0.2)
    executor = start_executor("mp", 2)
    processes = _processes(executor)
    os.kill(processes[1].pid, signal.SIGSTOP)
    executor.shutdown()
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL]


def test_shutdown_wakes_the_thread_that_waits_for_a_step(
    start_executor: StartExecutor, null_settings: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu.multiproc_executor.STOP_SECONDS", 0.2)
    null_settings("step_seconds=60")
    executor = start_executor("mp", 2)
    executor.submit(_prefill())
    errors: list[str] = []

    def collect() -> None:
        try:
            executor.collect()
        except WorkerError as error:
            errors.append(str(error))

    thread = threading.Thread(target=collect)
    thread.start()
    executor.shutdown()
    thread.join(SECONDS)
    assert errors == ["the executor was shut down"]


def test_workers_ignore_ctrl_c(start_executor: StartExecutor) -> None:
    executor = start_executor("mp", 2)
    for pid in _pids(executor):
        os.kill(pid, signal.SIGINT)
    assert _run(executor, _prefill()).token_ids.size == 1


def test_workers_have_names(start_executor: StartExecutor) -> None:
    names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in _pids(start_executor("mp", 2))]
    assert names == ["headrace-rank0", "headrace-rank1"]


# The parent's end. The script has no `if __name__ == "__main__"`: starting workers must not run it again.

PARENT = """
import signal, sys, time
from gpu.config import ModelConfig, ParallelConfig, WorkerConfig
from gpu.executor_factory import executor_for

print("main", flush=True)
executor = executor_for(WorkerConfig(ModelConfig(load_format="null"), parallel=ParallelConfig(3)))
def tell(fraction=0.0):
    print(*(rank.process.pid for rank in executor._ranks), flush=True)
ending = sys.argv[1]
if ending == "loading":
    executor.start(tell)
executor.start()
tell()
if ending == "forgets":
    sys.exit(0)
if ending == "raises":
    raise RuntimeError
time.sleep(60)
"""


def _start_parent(tmp_path: Path, ending: str, settings: str = "") -> tuple[subprocess.Popen[str], list[int]]:
    script = tmp_path / "offline.py"
    script.write_text(PARENT)
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp"), ENVIRONMENT_VARIABLE: settings}
    parent = subprocess.Popen(
        [sys.executable, script, ending], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "main\n"
    return parent, [int(pid) for pid in parent.stdout.readline().split()]


@pytest.mark.parametrize(("ending", "settings"), [("runs", ""), ("loading", "load_seconds=2")])
def test_nothing_outlives_a_killed_parent(tmp_path: Path, ending: str, settings: str) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    parent, pids = _start_parent(tmp_path, ending, settings)
    assert len(pids) == 3
    parent.kill()
    rest, _ = parent.communicate(timeout=SECONDS)
    assert "main" not in rest
    wait_for(lambda: all(map(_is_gone, pids)), "the workers' end")
    assert set(os.listdir("/dev/shm")) == shared_memory
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize(("ending", "status"), [("forgets", 0), ("raises", 1)])
def test_a_parent_may_end_without_shutdown(tmp_path: Path, ending: str, status: int) -> None:
    parent, pids = _start_parent(tmp_path, ending)
    assert len(pids) == 3
    parent.communicate(timeout=SECONDS)
    assert parent.returncode == status
    assert all(map(_is_gone, pids))


def test_workers_log_through_the_parent(
    make_executor: StartExecutor, null_settings: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    null_settings("fail_while=load,fail_rank=1")
    with pytest.raises(WorkerError):
        make_executor("mp", 2).start()
    # rank 0 may have loaded, and told so, before rank 1 failed
    (error,) = (record for record in caplog.records if record.name == "gpu.worker" and record.levelname == "ERROR")
    assert error.processName == "rank1" and "Traceback" in error.getMessage()


# A model


@pytest.fixture(scope="module")
def tiny_llama_tokens(tiny_llama: Path) -> list[list[int]]:
    """[step][row] from the model in this process."""
    executor = executor_for(_config("uni", 1, load_format="auto", model=str(tiny_llama)))
    executor.start()
    executor.allocate_kv(100, 1000)
    tokens = _serve_two(executor)
    executor.shutdown()
    return tokens


def _serve_two(executor: Executor) -> list[list[int]]:
    """A greedy and a sampled request beside each other, the second a step later."""
    executor.submit(_prefill(0, temperature=0.0))
    first = _prefill(1, seed=11, row=1, temperature=1.0)
    executor.submit(SchedulerOutput(1, [], first.new_requests, _int32(), _int32(), _int32(0, 1), _int32(1, 3), 4))
    for step in range(2, 12):
        executor.submit(SchedulerOutput(step, [], [], _int32(), _int32(), _int32(0, 1), _int32(1, 1), 2))
    return [executor.collect().token_ids.tolist() for _ in range(12)]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_processes_sample_what_one_process_does(
    start_executor: StartExecutor, tiny_llama: Path, tiny_llama_tokens: list[list[int]], num_ranks: int
) -> None:
    executor = start_executor("mp", num_ranks, load_format="auto", model=str(tiny_llama))
    assert _serve_two(executor) == tiny_llama_tokens
    assert [len(tokens) for tokens in tiny_llama_tokens] == [1] + [2] * 11


def test_the_death_of_a_rank_ends_a_collective(start_executor: StartExecutor, tiny_llama: Path) -> None:
    """The rank that waits for the dead one may be the first to fail: the dead one is named all the same."""
    executor = start_executor("mp", 2, load_format="auto", model=str(tiny_llama))
    os.kill(_pids(executor)[1], signal.SIGSTOP)
    executor.submit(_prefill(0))
    os.kill(_pids(executor)[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"^rank 1 was killed by signal 9 in step 0"):
        executor.collect()
