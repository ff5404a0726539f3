"""From an engine's configuration to the executor of its workers. Imports little, so that they begin early."""

from __future__ import annotations

import subprocess

from engine.config import EngineConfig
from engine.runtime.capacity import step_limits
from gpu.config import WorkerConfig
from gpu.executor import Executor
from gpu.executor_factory import executor_for


def make_executor(config: EngineConfig) -> Executor:
    """Not launched yet. Raises UnsupportedConfiguration."""
    budget, max_num_seqs = step_limits(config.scheduler, *_device(config))
    return executor_for(WorkerConfig(config.model, config.cache, config.parallel, max_num_seqs, budget))


def _device(config: EngineConfig) -> tuple[str, int, str]:
    """(device, memory in bytes, name) without loading torch; memory and name of the first GPU by nvidia-smi."""
    if config.model.device == "cpu" or config.model.computes_nothing:
        return "cpu", 0, ""
    try:
        query = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
        first = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ("cuda" if config.model.device == "cuda" else "cpu"), 0, ""
    mebibytes, name = first.split(",", 1)
    return "cuda", int(mebibytes) << 20, name.strip()
