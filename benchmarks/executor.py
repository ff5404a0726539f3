"""What a step costs on its way to the workers and back: `python -m benchmarks.executor` from the repository's root.

Pure decode steps of the null runner, submitted and collected one at a time, through the executor in this process (uni) and through
processes (mp). The runner's own time is in both: the difference is what processes cost. The ratio is to uni in the same run.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from gpu.config import ModelConfig, ParallelConfig, WorkerConfig
from gpu.executor import Executor
from gpu.executor_factory import executor_for
from gpu.plan import NewRequest, SamplingParams, SchedulerOutput

NONE = np.zeros(0, np.int32)
BLOCK_SIZE = 16


def decode_steps(executor: Executor, num_rows: int, num_steps: int) -> list[float]:
    """Seconds of each of `num_steps` steps in which `num_rows` rows decode; the rows have their blocks before."""
    blocks_per_row = -(-(num_steps + 2) // BLOCK_SIZE)
    executor.allocate_kv(1 + num_rows * blocks_per_row, num_steps + 2)
    table = 1 + np.arange(num_rows * blocks_per_row, dtype=np.int32).reshape(num_rows, blocks_per_row)
    requests = [NewRequest(row, np.ones(1, np.int32), 1, 0, table[row], SamplingParams(), row) for row in range(num_rows)]
    rows = np.arange(num_rows, dtype=np.int32)
    ones = np.ones(num_rows, np.int32)
    executor.submit(SchedulerOutput(0, [], requests, NONE, NONE, rows, ones, num_rows))
    executor.collect()
    seconds = []
    for step in range(1, num_steps + 1):
        plan = SchedulerOutput(step, [], [], NONE, NONE, rows, ones, num_rows)
        started = time.perf_counter()
        executor.submit(plan)
        executor.collect()
        seconds.append(time.perf_counter() - started)
    executor.submit(SchedulerOutput(num_steps + 1, rows.tolist(), [], NONE, NONE, NONE, NONE, 0))
    executor.collect()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.executor", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256, 1024], help="rows that decode in a step")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of processes to measure mp with")
    parser.add_argument("--steps", type=int, default=1000, help="steps for each number")
    options = parser.parse_args()
    table = Table("executor", "rows", "median µs", "p99 µs", "÷ uni", title=f"round trip of a step, {options.steps} steps each")
    uni: dict[int, float] = {}
    for name, parallel in [
        ("uni", ParallelConfig(distributed_executor_backend="uni")),
        *(
            (f"mp, {ranks} rank{'s' * (ranks > 1)}", ParallelConfig(ranks, distributed_executor_backend="mp"))
            for ranks in options.ranks
        ),
    ]:
        executor = executor_for(
            WorkerConfig(
                ModelConfig(load_format="null"),
                parallel=parallel,
                max_num_seqs=max(options.rows),
                max_num_batched_tokens=max(options.rows),
            )
        )
        executor.start()
        for num_rows in options.rows:
            median, slow = np.percentile(decode_steps(executor, num_rows, options.steps), [50, 99]) * 1e6
            uni.setdefault(num_rows, median)
            table.add_row(name, str(num_rows), f"{median:.0f}", f"{slow:.0f}", f"{median / uni[num_rows]:.1f}")
        executor.shutdown()
    Console().print(table)


if __name__ == "__main__":
    main()
