"""How many engines `serve` starts and how many threads each has, with the reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from engine.config import ServeConfig
from gpu.machine import available_cores, available_memory, compute_threads
from ops.settings import Resolved

MOST_REPLICAS = 4
GPU_DEVICES = ("nvidia0", "nvidiactl", "dxg", "kfd")  # without one of them in /dev there is no GPU to ask torch about
GGUF_EXPANSION = 4  # a weight of half a byte in the file takes two in memory
WEIGHTS_SHARE = 0.5  # of the memory that engines may use; the rest is for their KV


def settle_replicas(resolved: Resolved) -> None:
    """Derive what was left open of `data_parallel_size` and, on the CPU, `num_threads`."""
    config = resolved.config
    computes_on_cpu = config.model.load_format != "null" and not _on_gpu(config.model.device)
    if config.parallel.data_parallel_size == 0:
        resolved.derive("data_parallel_size", *_choose(config, computes_on_cpu))
    if computes_on_cpu and config.parallel.num_threads == 0:
        replicas, cores = config.parallel.data_parallel_size, available_cores()
        threads = compute_threads(cores, replicas, config.parallel.tensor_parallel_size)
        resolved.derive("num_threads", threads, f"{_plural(cores, 'core')}, {_plural(replicas, 'engine')}")


def _choose(config: ServeConfig, computes_on_cpu: bool) -> tuple[int, str]:
    """(replicas, reason)."""
    if config.model.load_format == "null":
        return 1, "nothing is computed"
    if not computes_on_cpu:
        return 1, "one on a GPU"
    if config.parallel.tensor_parallel_size > 1:
        return 1, "its ranks share the cores"
    cores = available_cores()
    by_cores = max(1, min(MOST_REPLICAS, cores // 2)) if cores != 2 else 2
    by_memory = _that_fit(Path(config.model.model), config.cache.gpu_memory_utilization * available_memory())
    if by_memory < by_cores:
        return by_memory, f"{_plural(cores, 'core')}, but memory for the weights of {by_memory} at most"
    if by_cores == 1:
        return 1, _plural(cores, "core")
    return by_cores, f"{cores} cores: decodes take one thread an engine, which several engines fill them with"


def _that_fit(model: Path, memory: float) -> int:
    """Engines, at least one, whose weights, a copy each, leave memory for KV."""
    files = [model] if model.is_file() else list(model.glob("*.safetensors"))
    weights = sum(file.stat().st_size for file in files) * (GGUF_EXPANSION if model.suffix == ".gguf" else 1)
    return max(1, int(WEIGHTS_SHARE * memory / max(1, weights)))


def _on_gpu(device: str) -> bool:
    """As a worker will find. torch is asked, in a process of its own, only where there may be a GPU."""
    if device != "auto":
        return device == "cuda"
    if not any(Path("/dev", name).exists() for name in GPU_DEVICES):
        return False
    question = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-P", "-c", question], stderr=subprocess.DEVNULL, check=False).returncode == 0


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
