"""No step of a CPU takes longer than half a second: the scheduler on a machine of the test, whose steps take what the test says."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from engine.config import SchedulerConfig
from engine.protocol import STEP_SECONDS_BOUNDS
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_cost import StepCost, StepPace
from gpu.config import CacheConfig, ModelConfig, ParallelConfig, WorkerConfig
from gpu.plan import ModelRunnerOutput, SchedulerOutput
from gpu.stand_in.null import NullRunner
from tests.engine.scheduling.harness import make_request

LONGEST = 0.5
MEASURED = StepCost(0.0, 0.0005, 6e-7)  # as of the demo model on a core of an EPYC
BLOCK_SIZE, NUM_BLOCKS, LONGEST_PROMPT = 16, 2200, 8192


class Machine:
    """An engine of two threads that has one step planned ahead. `threads_at` says how many it has at a time."""

    def __init__(
        self, threads_at: Callable[[float], int], slowness: float = 1.0, noise: float = 0.03, sure_threads: int = 1
    ) -> None:
        config = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=16)
        self.pace = StepPace(LONGEST, sure_threads)
        self.scheduler = Scheduler(config, BLOCK_SIZE, NUM_BLOCKS, LONGEST_PROMPT, cost=MEASURED, pace=self.pace)
        cache = CacheConfig(block_size=BLOCK_SIZE)
        self.worker = NullRunner(WorkerConfig(ModelConfig(), cache, ParallelConfig(), max_num_seqs=16, max_num_batched_tokens=512))
        self.worker.allocate_kv(NUM_BLOCKS, LONGEST_PROMPT)
        self.time = 0.0
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self._threads_at, self._slowness, self._noise = threads_at, slowness, noise
        self._random = random.Random(1)
        self._out: deque[SchedulerOutput] = deque()

    def run(self, seconds: float) -> None:
        while self.scheduler.has_work and self.time < seconds:
            while len(self._out) < 2:
                plan = self.scheduler.schedule(self.time)
                if not plan.total_num_scheduled_tokens:
                    break
                self._out.append(plan)
            plan = self._out.popleft()
            self.scheduler.update_from_output(plan, self._execute(plan), self.time)

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        contexts = {new.row: new.num_computed_tokens for new in plan.new_requests}
        tokens = plan.num_scheduled_tokens.tolist()
        before = [contexts.get(row, int(self.worker.num_computed[row])) for row in plan.rows.tolist()]
        output = self.worker.execute(plan)
        output.num_threads = self._threads_at(self.time)
        noise = max(0.5, self._random.gauss(1.0, self._noise))
        cost = sum(map(MEASURED.seconds, tokens, before))
        output.forward_seconds = cost * self._slowness * noise / output.num_threads
        self.time += output.forward_seconds
        self.seconds.append(output.forward_seconds)
        self.tokens.append(sum(tokens))
        return output


def give_long_prompts(machine: Machine, count: int = 4) -> None:
    machine.scheduler.add_request(make_request("decode", 20, max_tokens=4000))
    for number in range(count):
        machine.scheduler.add_request(make_request(f"prompt {number}", 7900))


@pytest.mark.parametrize("alone", [2.0, 5.0, 10.0])
def test_steps_end_in_time_when_another_engine_takes_the_borrowed_core(alone: float) -> None:
    machine = Machine(lambda time: 2 if time % (2 * alone) < alone else 1)
    give_long_prompts(machine)
    machine.run(60.0)
    assert max(machine.seconds) <= LONGEST


@pytest.mark.parametrize("slowness", [0.5, 1.0, 1.5, 3.0])
def test_steps_end_in_time_though_the_machine_is_not_as_it_was_measured(slowness: float) -> None:
    machine = Machine(lambda time: 1, slowness)
    give_long_prompts(machine)
    machine.run(60.0)
    assert max(machine.seconds[6:]) <= LONGEST
    with_prompts = [seconds for seconds, tokens in zip(machine.seconds, machine.tokens, strict=True) if 32 < tokens < 512]
    assert np.mean(with_prompts[6:]) > 0.8 * LONGEST, "the time that a step may take is used"


def test_an_engine_that_shares_with_none_uses_all_its_threads() -> None:
    machine = Machine(lambda time: 2, sure_threads=2)
    give_long_prompts(machine)
    machine.run(20.0)
    assert 0.8 * LONGEST < np.mean(machine.seconds[-10:]) <= max(machine.seconds) <= LONGEST


def test_operators_see_how_long_steps_are_and_how_much_longer_than_measured() -> None:
    machine = Machine(lambda time: 1, slowness=2.0, noise=0.0)
    give_long_prompts(machine)
    machine.run(20.0)
    stats = machine.scheduler.stats()
    assert stats.step_slowdown == pytest.approx(2.0, rel=0.01)
    assert stats.step_seconds_sum == pytest.approx(sum(machine.seconds))
    counts = dict(zip(STEP_SECONDS_BOUNDS, stats.step_seconds_buckets, strict=False))
    assert counts[0.1] < counts[0.5] < counts[1.0] == stats.step_seconds_buckets[-1] == len(machine.seconds)


def test_one_step_that_hung_is_forgotten_soon() -> None:
    pace = StepPace(LONGEST)
    for _ in range(30):
        pace.observe(0.4, 0.4, 1)
    usual = pace.affordable
    pace.observe(usual, 20 * usual, 1)
    assert 0 < pace.affordable < usual / 4
    for _ in range(40):
        pace.observe(pace.affordable, pace.affordable, 1)
    assert pace.affordable == pytest.approx(usual, rel=0.05)


def test_a_calm_machine_may_be_disturbed() -> None:
    pace = StepPace(LONGEST)
    for _ in range(100):
        pace.observe(pace.affordable, pace.affordable, 1)
    assert 0.8 * LONGEST < pace.affordable and 1.15 * pace.affordable <= LONGEST


def test_a_short_step_tells_nothing() -> None:
    pace = StepPace(LONGEST)
    before = pace.affordable
    pace.observe(0.01, 5.0, 1)
    assert pace.affordable == before
