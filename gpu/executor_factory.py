"""The choice of an executor. Torch-free."""

from __future__ import annotations

from gpu.config import WorkerConfig
from gpu.errors import UnsupportedConfiguration
from gpu.executor import Executor
from gpu.multiproc_executor import MultiprocExecutor
from gpu.uniproc_executor import UniProcExecutor


def executor_for(config: WorkerConfig) -> Executor:
    """The executor that the configuration names. Raises UnsupportedConfiguration for `uni` with more than one rank."""
    if config.parallel.distributed_executor_backend == "mp":
        return MultiprocExecutor(config)
    if config.parallel.tensor_parallel_size > 1:
        raise UnsupportedConfiguration("uni runs one rank: --tensor-parallel-size above 1 needs mp")
    return UniProcExecutor(config)
