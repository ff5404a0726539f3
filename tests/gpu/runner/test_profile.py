"""What the largest step is found to need: what it held for a moment, neither the weights that it mapped nor what loading held."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch

from gpu import control_group, machine
from gpu.config import Capacity, WorkerConfig
from gpu.distributed import TensorParallelGroup
from gpu.runner import profile
from gpu.runner.profile import SHORT_LEN, WARM_LEN, Profiler
from gpu.runner.sampling_table import SamplingTable
from gpu.runner.step_profile import KeptProfile, StepProfile
from gpu.runner.token_rules import Histories
from tests.gpu.engine_stub import make_config, make_runner
from tests.gpu.tiny_models import save_model
from tests.waiting import wait_for

MIB = 1 << 20
AVAILABLE = 2048 * MIB
CLOSE = 12 * MIB  # what else comes and goes in this process


@pytest.fixture(autouse=True)
def roomy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_group, "MOUNT", tmp_path / "none")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=AVAILABLE))


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[mmap.mmap]:
    """64 MiB of a file, mapped, not read yet."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(64 * MIB))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        yield mapped


class StandIn(Profiler):
    """Has nothing but its largest step."""

    def __init__(self, step: Callable[[], None], kept: KeptProfile | None = None, group: TensorParallelGroup | None = None) -> None:
        nothing = cast(Any, None)
        group = group or TensorParallelGroup()
        super().__init__(WorkerConfig(), nothing, nothing, nothing, nothing, group, torch.device("cpu"), kept)
        self.step = step
        self.is_warm = False

    def _largest_step(self) -> None:
        self.step()

    def _warm_step(self) -> None:
        self.is_warm = True

    def _prompt_cost(self) -> tuple[float, float]:
        return 1.0, 0.0

    def available_kv_bytes(self) -> int:
        return self.kv_bytes_on_cpu(self.profile_on_cpu().memory)


def hold_for_a_moment(num_bytes: int) -> None:
    with mmap.mmap(-1, num_bytes) as memory:
        for page in range(0, num_bytes, mmap.PAGESIZE):
            memory[page] = 1


def needed(step: Callable[[], None]) -> float:
    """Bytes that the profiler takes off the memory available for `step`, beside the mapped pages that this process had before."""
    before = psutil.Process().memory_info().shared
    left = StandIn(step).available_kv_bytes() / WorkerConfig().cache.gpu_memory_utilization
    return AVAILABLE - before - left


@pytest.mark.parametrize("mapped_first", [True, False])
def test_weights_that_the_step_maps_are_taken_off_once(weights: mmap.mmap, mapped_first: bool) -> None:
    def map_weights() -> None:
        assert sum(weights[page] for page in range(0, len(weights), mmap.PAGESIZE)) == 0

    def step() -> None:
        for part in (map_weights, hold) if mapped_first else (hold, map_weights):
            part()

    def hold() -> None:
        hold_for_a_moment(32 * MIB)

    assert needed(step) == pytest.approx((64 + 32) * MIB, abs=CLOSE)


def test_a_step_of_every_replica_has_its_memory() -> None:
    def hold() -> None:
        hold_for_a_moment(64 * MIB)

    alone, several = StandIn(hold), StandIn(hold)
    several.config.parallel.data_parallel_size = 4
    utilization = several.config.cache.gpu_memory_utilization
    less = alone.available_kv_bytes() - 4 * several.available_kv_bytes()
    assert less == pytest.approx(utilization * 3 * 64 * MIB, abs=4 * CLOSE)


def test_what_loading_held_hides_nothing_and_is_not_counted() -> None:
    hold_for_a_moment(96 * MIB)
    assert needed(lambda: hold_for_a_moment(32 * MIB)) == pytest.approx(32 * MIB, abs=CLOSE)


def test_a_kernel_that_keeps_the_peak_leaves_too_little_rather_than_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "status").symlink_to("/proc/self/status")
    (tmp_path / "proc" / "clear_refs").mkdir()  # which cannot be written
    monkeypatch.setattr(machine, "PROCESS", tmp_path / "proc")
    hold_for_a_moment(96 * MIB)
    assert needed(lambda: hold_for_a_moment(32 * MIB)) > (96 * MIB) - CLOSE


def test_a_kernel_that_does_not_tell_the_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t1000 kB\nThreads:\t1\n")
    monkeypatch.setattr(machine, "PROCESS", tmp_path)
    monkeypatch.setattr("resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=1300))
    assert machine.passing_memory(lambda: None) == 300 * 1024


def test_the_largest_step_samples_all_rows(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    runner = make_runner(make_config(tmp_path, max_num_seqs=7, budget=48))
    sampled = []

    def sample(logits: torch.Tensor, rows: np.ndarray, table: SamplingTable, histories: Histories) -> None:
        sampled.append((len(logits), rows.tolist(), np.count_nonzero(table.penalized)))

    Profiler(runner.config, runner.model, sample, runner.make_kv, runner.make_batch, runner.group, runner.device)._largest_step()
    assert sampled == [(7, list(range(7)), 6)]


def test_a_later_start_knows_what_steps_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = tmp_path / "model", tmp_path / "folder"
    save_model("llama", model)
    folder.mkdir()

    def start(**more: Any) -> tuple[Capacity, list[int]]:
        """What it says of itself, and the tokens of the steps that were computed."""
        runner = make_runner(make_config(model, dtype="float16", weights_cache_dir=str(folder), **more))
        forward, steps = runner.model.forward, []

        def count(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
            steps.append(len(token_ids))
            return forward(token_ids, *rest)

        runner.model.forward = count  # type: ignore[method-assign]
        return runner.capacity(), steps

    first, steps = start(budget=300)
    assert steps == [300, 300, SHORT_LEN], "what is computed first compiles"
    again, steps = start(budget=300)
    assert steps == [WARM_LEN]
    assert again.available_kv_bytes == pytest.approx(first.available_kv_bytes, abs=CLOSE)
    assert again.profiled_seconds_per_token == first.profiled_seconds_per_token > 0
    assert again.profiled_seconds_per_context == first.profiled_seconds_per_context
    assert start(budget=200)[1][0] == 200, "the largest step is another one"
    for kept in folder.glob("*.step"):
        kept.write_text("nonsense")
    assert start(budget=300)[1][0] == 300
    assert start(budget=300)[1] == [WARM_LEN], "it is made anew"
    monkeypatch.setattr(machine, "processor", lambda: "a faster one")
    assert start(budget=300)[1][0] == 300


def nothing_to_do() -> None:
    raise AssertionError("another engine has measured this step")


@pytest.mark.parametrize("fails", [False, True])
def test_of_engines_that_start_together_one_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(profile, "CACHE_DIRECTORY", tmp_path)
    kept, may_end, measured = KeptProfile(tmp_path / "kept.step"), threading.Event(), []

    def step() -> None:
        assert may_end.wait(20)
        if fails:
            raise RuntimeError("it does not compile")

    first = StandIn(step, kept)
    second = StandIn(lambda: measured.append("again") if fails else nothing_to_do(), kept)
    with ThreadPoolExecutor(2) as threads:
        leading = threads.submit(first.profile_on_cpu)
        wait_for(lambda: (tmp_path / "lock").exists(), "the first to begin")
        following = threads.submit(second.profile_on_cpu)
        wait_for(lambda: "another engine compiles and measures; waiting" in caplog.text, "the second to wait")
        may_end.set()
        assert following.result(20).seconds_per_token == 1.0
        if fails:
            with pytest.raises(RuntimeError, match="it does not compile"):
                leading.result()
        else:
            assert following.result() == leading.result() == kept.read()
    assert bool(measured) == fails
    assert second.is_warm != fails


def test_a_start_that_cannot_wait_for_others_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profile, "CACHE_DIRECTORY", tmp_path / "nowhere")
    assert StandIn(lambda: None).profile_on_cpu().seconds_per_token == 1.0
    assert "cannot be locked" in caplog.text


def test_ranks_compute_the_same_steps_even_if_one_has_lost_its_profile(tmp_path: Path) -> None:
    class WithOneThatKnowsNothing(TensorParallelGroup):
        def all_say(self, yes: bool) -> bool:
            return False

    kept, steps = KeptProfile(tmp_path / "kept.step"), []
    kept.write(StepProfile(5, 0.1, 0.0))
    StandIn(lambda: steps.append("largest"), kept, WithOneThatKnowsNothing(0, 2)).profile_on_cpu()
    assert steps == ["largest", "largest"]


@pytest.mark.parametrize("kept", ["", "5", "[]", "{}", '{"memory": 5, "seconds_per_token": 0, "seconds_per_context": 0}'])
def test_what_is_no_profile_is_not_taken_for_one(tmp_path: Path, kept: str) -> None:
    (tmp_path / "file").write_text(kept)
    assert KeptProfile(tmp_path / "file").read() is None


def test_where_nothing_can_be_kept_steps_are_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = KeptProfile(tmp_path / "nowhere" / "file")
    assert kept.read() is None
    kept.write(StepProfile(5, 0.1, 0.0))
    assert "cannot be written" in caplog.text
    assert KeptProfile(None).read() is None
