"""What one thread does of a model's products, by rows, and how fast memory is read: one JSON line.

    python -m benchmarks.rates MODEL [--dtype float16] [--quantization int8] [--rows 1 2 4 8 16 32 64 128]

The product is the largest of a layer, in the model's numeric class, its weights in the cache. Run it while nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from gpu.checkpoint.weights import open_checkpoint
from gpu.config import ModelConfig, ParallelConfig, WorkerConfig
from gpu.distributed import TensorParallelGroup
from gpu.machine import available_cores
from gpu.models.decoder import CausalLM
from gpu.models.linear import Linear
from gpu.runner.runner import ModelRunner

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
MEMORY = 256 << 20  # bytes that are read, more than caches hold
LEAST_MEMORY = 64 << 20  # of each of several threads


def load_alone(config: ModelConfig) -> ModelRunner:
    """The model in this process, on one thread of the CPU."""
    worker = WorkerConfig(config, parallel=ParallelConfig(num_threads=1, distributed_executor_backend="uni"))
    runner = ModelRunner(worker, open_checkpoint(config.model), torch.device("cpu"), TensorParallelGroup())
    runner.load(lambda fraction: None)
    return runner


def count_bytes(model: CausalLM) -> int:
    """Bytes of the matrices that a step reads: the layers' and the head's."""
    layers = [
        linear
        for layer in model.layers
        for linear in (layer.attention.qkv, layer.attention.output.linear, layer.mlp.gate_up, layer.mlp.down.linear)
    ]
    return sum(linear.num_bytes for linear in (*layers, model.head.linear))


def measure_rates(runner: ModelRunner, rows: Sequence[int]) -> dict[int, float]:
    """Rates by number of rows, each the best of several rounds, so that a disturbed moment spoils none."""
    rounds = [{num_rows: measure_rate(runner, num_rows, 10) for num_rows in rows} for _ in range(5)]
    return {num_rows: max(each[num_rows] for each in rounds) for num_rows in rows}


def measure_rate(runner: ModelRunner, num_rows: int, count: int = 30) -> float:
    """FLOP a second of the class's product at this many rows, weights in the cache: the best of `count`."""
    linear: Linear = runner.model.layers[0].mlp.gate_up
    config = runner.model.config
    x = torch.randn(num_rows, config.hidden_size).to(runner.numerics.activations)
    return 2 * num_rows * config.hidden_size * 2 * config.intermediate_size / best_of(lambda: linear(x), count)


def measure_bandwidth(num_threads: int = 1) -> float:
    """Bytes a second that this many threads read together, each memory of its own."""
    each = max(LEAST_MEMORY, MEMORY // num_threads)
    memories = [torch.ones(each // torch.float32.itemsize) for _ in range(num_threads)]
    with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        seconds = best_of(lambda: list(threads.map(torch.sum, memories)), 20)
    return sum(memory.nbytes for memory in memories) / seconds


def best_of(work: Callable[[], object], count: int) -> float:
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rates", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--dtype")
    parser.add_argument("--quantization")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("dtype", "quantization") if getattr(options, name) is not None}
    runner = load_alone(ModelConfig(model=options.model, device="cpu", **given))
    with torch.inference_mode():
        found = {
            "class": str(runner.numerics),
            "weight_bytes": count_bytes(runner.model),
            "rates": measure_rates(runner, options.rows),
            "bandwidth": measure_bandwidth(),
            "shared_bandwidth": measure_bandwidth(available_cores()),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
