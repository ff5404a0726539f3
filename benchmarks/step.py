"""Seconds of a model's steps, by numeric class, beside the bound counted from its products and bytes; and what headrace adds.

    python -m benchmarks.step MODEL                     # decodes at 200 tokens of context, a prompt of 128
    python -m benchmarks.step MODEL --threads 1 2
    python -m benchmarks.step null                      # no model: what is around it, at 256 and 1024 running

Classes and thread counts take turns, step by step, so that a busy machine is busy for all; medians. The bound is the slower of the
products at the class's rate and the weights' bytes at the memory's, both measured in this process just before; threads share
the memory's.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.counting import Machine, Work, count_step
from benchmarks.overhead import measure_overhead
from benchmarks.rates import count_bytes, measure_bandwidth, measure_rate
from gpu.config import CacheConfig, ModelConfig, ParallelConfig, WorkerConfig
from gpu.distributed import TensorParallelGroup
from gpu.machine import available_cores
from gpu.plan import NewRequest, SamplingParams, SchedulerOutput
from gpu.runner import ModelRunner
from gpu.weights import open_checkpoint
from kernels import cpu_threads

NONE = np.zeros(0, np.int32)
BLOCK_SIZE = 16
CONTEXT = 200
PROMPT = 128
MAX_LEN = 512
CLASSES = ("float32", "float16", "int8", "gguf", "bfloat16")


class Model:
    """A runner of one class and thread count, driven by plans of pure decodes and of single prompts."""

    def __init__(self, path: str, name: str, threads: int, most_rows: int) -> None:
        self.name, self.threads = name, threads
        quantized = name in ("int8", "gguf")
        self.config = WorkerConfig(
            model=ModelConfig(
                model=path, dtype="auto" if quantized else name, quantization=name if quantized else "none", device="cpu"
            ),
            cache=CacheConfig(block_size=BLOCK_SIZE),
            parallel=ParallelConfig(num_threads=threads, distributed_executor_backend="uni"),
            max_num_seqs=most_rows + 1,
        )
        self.runner = ModelRunner(self.config, open_checkpoint(path), torch.device("cpu"), TensorParallelGroup())
        self.runner.load(lambda fraction: None)
        blocks = -(-MAX_LEN // BLOCK_SIZE)
        self.runner.allocate_kv(1 + blocks * (most_rows + 1), MAX_LEN)
        self.blocks = 1 + np.arange(blocks * (most_rows + 1), dtype=np.int32).reshape(-1, blocks)
        self.step = 0
        self.generator = np.random.default_rng(0)

    def execute(self, freed: list[int], new: list[NewRequest], rows: np.ndarray, counts: np.ndarray) -> float:
        plan = SchedulerOutput(self.step, freed, new, NONE, NONE, rows, counts, int(counts.sum()))
        self.step += 1
        started = time.perf_counter()
        self.runner.execute(plan)
        return time.perf_counter() - started

    def new(self, row: int, length: int, computed: int = 0) -> NewRequest:
        tokens = self.generator.integers(100, 10_000, length).astype(np.int32)
        return NewRequest(row, tokens, length, computed, self.blocks[row], SamplingParams(temperature=0.0), row)

    def start_decodes(self, num_rows: int) -> None:
        """Rows with CONTEXT tokens, whose KV is taken as it lies in memory: its values do not change what a step costs."""
        for layer in self.runner.kv.layers:
            for cache in layer:
                cache.fill_(0.5)
        new = [self.new(row, CONTEXT, CONTEXT - 1) for row in range(num_rows)]
        self.execute([], new, np.arange(num_rows, dtype=np.int32), np.ones(num_rows, np.int32))

    def decode(self, num_rows: int) -> float:
        return self.execute([], [], np.arange(num_rows, dtype=np.int32), np.ones(num_rows, np.int32))

    def stop_decodes(self, num_rows: int) -> None:
        self.execute(list(range(num_rows)), [], NONE, NONE)

    def prefill(self) -> float:
        row = self.config.max_num_seqs - 1
        seconds = self.execute([], [self.new(row, PROMPT)], np.array([row], np.int32), np.array([PROMPT], np.int32))
        self.execute([row], [], NONE, NONE)
        return seconds

    def count(self, num_tokens: int, num_sampled: int) -> Work:
        context = CONTEXT if num_tokens == num_sampled else PROMPT / 2
        return count_step(self.runner.model.config, num_tokens, num_sampled, context, count_bytes(self.runner.model))

    def machine(self, num_rows: int, bandwidth: float, shared_bandwidth: float) -> Machine:
        """What the model's threads can do together: the rate is that of one of them, with products of so many rows."""
        for set_num_threads in (torch.set_num_threads, cpu_threads.set_num_threads):
            set_num_threads(1)  # more than two are left inside operations
        rate = measure_rate(self.runner, num_rows)
        return Machine({num_rows: rate}, bandwidth, shared_bandwidth, min(self.threads, available_cores()))


def measure_model(path: str, classes: list[str], threads: list[int], rows: list[int], num_steps: int) -> Table:
    models = [Model(path, name, count, max(rows)) for name in classes for count in threads]
    torch.set_num_threads(1)
    bandwidth, shared_bandwidth = measure_bandwidth(), measure_bandwidth(available_cores())
    table = Table(
        "step", "class", "threads", "ms", "best ms", "GFLOP/s", "bound ms", "of the bound",
        title=f"medians of {num_steps}; one thread reads {bandwidth / 1e9:.1f} GB/s, all {shared_bandwidth / 1e9:.1f}",
    )  # fmt: skip
    for num_rows in [*rows, 0]:
        for model in models:
            if num_rows:
                model.start_decodes(num_rows)
                model.decode(num_rows)
            else:
                model.prefill()
        taken: dict[int, list[float]] = {id(model): [] for model in models}
        for _ in range(num_steps):
            for model in models:
                taken[id(model)].append(model.decode(num_rows) if num_rows else model.prefill())
        for model in models:
            if num_rows:
                model.stop_decodes(num_rows)
            work = model.count(num_rows or PROMPT, num_rows or 1)
            bound = model.machine(num_rows or PROMPT, bandwidth, shared_bandwidth).seconds(work, num_rows or PROMPT)
            median, best = statistics.median(taken[id(model)]), min(taken[id(model)])
            table.add_row(
                f"decode {num_rows}" if num_rows else f"prompt {PROMPT}", model.name, str(model.threads),
                f"{median * 1e3:.1f}", f"{best * 1e3:.1f}", f"{work.flops / median / 1e9:.0f}", f"{bound * 1e3:.1f}",
                f"{bound / median:.0%}",
            )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a .gguf file or a safetensors directory; null: what is around the model")
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=["float32", "float16", "int8"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    if options.model == "null":
        tables = measure_overhead([256, 1024], options.steps * 20)
    else:
        tables = [measure_model(options.model, options.classes, options.threads, options.rows, options.steps)]
    Console(width=120).print(*tables, sep="\n\n")


if __name__ == "__main__":
    main()
