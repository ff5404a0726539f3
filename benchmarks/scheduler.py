"""Time of `schedule()` plus `update_from_output()` for steps of pure decodes; beside vLLM's Scheduler, driven the same way, when
a Python that has vLLM is named.

    python -m benchmarks.scheduler
    python -m benchmarks.scheduler --vllm-python $PEERS_DIR/vllm/bin/python --vllm-model $PEERS_DIR/models/smollm2-hf

Requests with prompts of 100 tokens, all different, decode without end; budget 8192 tokens, blocks of 16, prefix cache on. Making
the worker's answer is not in the times. Times are CPU time of the one thread that works, which on an idle machine is the time that
passes and on a busy one leaves the others out. Both schedulers take turns, size by size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.config import SchedulerConfig
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from gpu.plan import ModelRunnerOutput, SamplingParams

SIZES = (16, 256, 1024)
NUM_STEPS = 160  # measured; ten times round a block, so that each request crosses ten borders


@dataclass
class Times:
    """Milliseconds a step."""

    calm: list[float]  # steps in which no request gets or completes a block
    every: list[float]

    def row(self) -> str:
        calm = f"{statistics.median(self.calm):8.3f}" if self.calm else "       -"
        return f"{calm} {statistics.median(self.every):8.3f} {statistics.fmean(self.every):8.3f} {max(self.every):8.3f}"


def time_headrace(num_requests: int) -> Times:
    config = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=num_requests)
    scheduler = Scheduler(config, block_size=16, num_blocks=40_000, max_model_len=2048)
    for index in range(num_requests):
        prompt = np.full(100, index + 3, dtype=np.int32)
        scheduler.add_request(Request(str(index), prompt, SamplingParams(max_tokens=1500, ignore_eos=True)))
    worker = np.zeros((2, num_requests), dtype=np.int64)  # tokens known and computed, by row
    times = Times([], [])
    while len(times.every) < NUM_STEPS:
        begin = time.thread_time()
        plan = scheduler.schedule(0.0)
        planned = time.thread_time()
        for new in plan.new_requests:
            worker[:, new.row] = len(new.token_ids), new.num_computed_tokens
        worker[1, plan.rows] += plan.num_scheduled_tokens
        rows = plan.rows[worker[1, plan.rows] == worker[0, plan.rows]]
        worker[0, rows] += 1
        output = ModelRunnerOutput(plan.step, rows, np.full(len(rows), 5, np.int32), [], [], {}, 0.0)
        answered = time.thread_time()
        scheduler.update_from_output(plan, output, 0.0)
        end = time.thread_time()
        if len(rows) == num_requests == plan.total_num_scheduled_tokens:
            taken = (planned - begin + end - answered) * 1e3
            times.every.append(taken)
            if len(plan.grown_rows) == 0 and (worker[1] % 16).all():
                times.calm.append(taken)
    scheduler.check_integrity()
    return times


class Peer:
    """vLLM's scheduler in its own interpreter: asked for a size, it answers with a line of times."""

    def __init__(self, python: str, model: str) -> None:
        driver = Path(__file__).with_name("vllm_scheduler.py")
        self.process = subprocess.Popen(
            [python, str(driver), model, str(NUM_STEPS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def time(self, num_requests: int) -> Times:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{num_requests}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                return Times(**json.loads(line))
        raise SystemExit(f"the interpreter with vLLM ended: status {self.process.wait()}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scheduler", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM")
    parser.add_argument("--vllm-model", help="a model directory for its ModelConfig")
    arguments = parser.parse_args()
    if bool(arguments.vllm_python) != bool(arguments.vllm_model):
        parser.error("--vllm-python and --vllm-model go together")
    peer = Peer(arguments.vllm_python, arguments.vllm_model) if arguments.vllm_python else None
    print("milliseconds a step        calm (median)  all: median   mean      max")
    for size in SIZES:
        ours = time_headrace(size)
        print(f"headrace, {size:5} decodes        {ours.row()}", flush=True)
        if peer is None:
            continue
        theirs = peer.time(size)
        print(f"vLLM,     {size:5} decodes        {theirs.row()}", flush=True)
        calm = f"{statistics.median(theirs.calm) / statistics.median(ours.calm):.0f}" if ours.calm and theirs.calm else "-"
        mean = statistics.fmean(theirs.every) / statistics.fmean(ours.every)
        median = statistics.median(theirs.every) / statistics.median(ours.every)
        print(f"vLLM's over headrace's: calm steps {calm}, all steps {median:.0f} (medians), {mean:.0f} (means)", flush=True)
    if peer is not None:
        peer.close()


if __name__ == "__main__":
    main()
