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
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.counting import Machine, Work, count_step
from benchmarks.driver import Driver
from benchmarks.overhead import measure_overhead
from benchmarks.rates import count_bytes, measure_bandwidth, measure_rate
from gpu.checkpoint.weights import open_checkpoint
from gpu.config import CacheConfig, ModelConfig, ParallelConfig, WorkerConfig
from gpu.machine import available_cores

BLOCK_SIZE = 16
CONTEXT = 200
PROMPT = 128
MAX_LEN = 512
CLASSES = ("float32", "float16", "int8", "gguf", "bfloat16")


class Model(Driver):
    """A runner of one class and thread count."""

    def __init__(self, path: str, name: str, threads: int, most_rows: int) -> None:
        self.name, self.threads = name, threads
        quantized = name in ("int8", "gguf")
        config = WorkerConfig(
            model=ModelConfig(
                model=path, dtype="auto" if quantized else name, quantization=name if quantized else "none", device="cpu"
            ),
            cache=CacheConfig(block_size=BLOCK_SIZE),
            parallel=ParallelConfig(num_threads=threads, distributed_executor_backend="uni"),
            max_num_seqs=most_rows,
        )
        super().__init__(config, open_checkpoint(path), torch.device("cpu"), MAX_LEN)
        self.fill_kv()

    def count(self, load: Load) -> Work:
        return count_step(self.runner.model.config, load.num_tokens, load.num_sampled, load.context, count_bytes(self.runner.model))

    def machine(self, num_rows: int, bandwidth: float, shared_bandwidth: float) -> Machine:
        """The joint speed of the model's threads, from the rate of one thread at products of this many rows."""
        torch.set_num_threads(1)  # more than two are left inside operations
        rate = measure_rate(self.runner, num_rows)
        return Machine({num_rows: rate}, bandwidth, shared_bandwidth, min(self.threads, available_cores()))


@dataclass(frozen=True)
class Load:
    """One load, measured step by step."""

    name: str
    num_tokens: int  # of a step
    num_sampled: int
    context: float  # tokens that one of them sees, in the mean
    start: Callable[[Model], object]  # leaves the model ready for steps
    step: Callable[[Model], float]  # seconds


def decodes(num_rows: int) -> Load:
    return Load(
        f"decode {num_rows}", num_rows, num_rows, CONTEXT,
        lambda model: model.start_decodes(num_rows, CONTEXT), lambda model: model.decode(num_rows),
    )  # fmt: skip


def prompt() -> Load:
    return Load(f"prompt {PROMPT}", PROMPT, 1, PROMPT / 2, lambda model: None, lambda model: model.prefill(PROMPT))


def measure_model(path: str, classes: list[str], threads: list[int], rows: list[int], num_steps: int) -> Table:
    models = [Model(path, name, count, max(rows)) for name in classes for count in threads]
    torch.set_num_threads(1)
    bandwidth, shared_bandwidth = measure_bandwidth(), measure_bandwidth(available_cores())
    table = Table(
        "step", "class", "threads", "ms", "best ms", "GFLOP/s", "bound ms", "of the bound",
        title=f"medians of {num_steps}; one thread reads {bandwidth / 1e9:.1f} GB/s, all {shared_bandwidth / 1e9:.1f}",
    )  # fmt: skip
    for load in [*map(decodes, rows), prompt()]:
        for model in models:
            load.start(model)
            load.step(model)
        taken: dict[int, list[float]] = {id(model): [] for model in models}
        for _ in range(num_steps):
            for model in models:
                taken[id(model)].append(load.step(model))
        for model in models:
            model.free()
            work = model.count(load)
            bound = model.machine(load.num_tokens, bandwidth, shared_bandwidth).seconds(work, load.num_tokens)
            median, best = statistics.median(taken[id(model)]), min(taken[id(model)])
            table.add_row(
                load.name, model.name, str(model.threads), f"{median * 1e3:.1f}", f"{best * 1e3:.1f}",
                f"{work.flops / median / 1e9:.0f}", f"{bound * 1e3:.1f}", f"{bound / median:.0%}",
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
