"""When a worker lets its runner rest, which gives the engine's cores to other engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing import Pipe

import numpy as np
import pytest

from gpu.config import CacheConfig, ModelConfig, ParallelConfig, WorkerConfig
from gpu.plan import SchedulerOutput, encode
from gpu.stand_in.null import NullRunner
from gpu.worker import Execute, Worker

NOTHING = np.array([], np.int32)
STEP = Execute(encode(SchedulerOutput(0, [], [], NOTHING, NOTHING, NOTHING, NOTHING, 0)))
# The time from an answer to the client's next request, at the least, on a machine of two cores.
NEXT_REQUEST_SECONDS = 0.006


class Resting(NullRunner):
    """Tells its worker to stop when it rests, so that `_next` returns."""

    worker: Worker
    num_rests = 0

    def rest(self) -> None:
        self.num_rests += 1
        self.worker._inbox.put(None)


@pytest.fixture
def runner() -> Iterator[Resting]:
    config = WorkerConfig(ModelConfig(load_format="null", device="cpu"), CacheConfig(), ParallelConfig(1), 8, 64)
    runner = Resting(config, rank=1)
    ends = [*Pipe(), *Pipe(duplex=False)]
    worker = runner.worker = Worker(1, ends[0], ends[3])
    worker._runner = runner
    yield runner
    for end in ends:
        end.close()


def test_a_runner_rests_before_the_next_request_can_reach_another_engine(runner: Resting) -> None:
    worker, took = runner.worker, []
    for _ in range(10):
        worker._obey(STEP)
        answered = time.perf_counter()
        assert worker._next() is None
        took.append(time.perf_counter() - answered)
    assert runner.num_rests == 10
    assert min(took) < NEXT_REQUEST_SECONDS, "a busy machine may delay some of them, not all"


def test_a_runner_whose_next_step_has_come_does_not_rest(runner: Resting) -> None:
    worker = runner.worker
    for _ in range(10):
        worker._obey(STEP)
        worker._inbox.put(STEP)
        assert worker._next() is STEP
    assert runner.num_rests == 0
