"""Which failures of a worker no new start mends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu.distributed import TensorParallelGroup
from gpu.errors import CheckpointError, UnsupportedConfiguration
from gpu.linear import Numerics
from gpu.runner import ModelRunner
from gpu.weights import open_checkpoint
from gpu.worker import describe, is_permanent, make_runner
from tests.gpu.engine_stub import make_config
from tests.gpu.tiny_models import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_model("llama", path)
    return path


def failure(work: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as raised:
        work()
    return raised.value


def test_quantization_on_a_gpu() -> None:
    error = failure(lambda: Numerics.choose("auto", "int8", torch.device("cuda")))
    assert is_permanent(error)
    assert describe(error) == "--quantization int8 is for the CPU; this engine runs on cuda"


def test_graph_sizes_are_checked_before_anything_is_loaded(folder: Path) -> None:
    config = make_config(folder, cuda_graph_sizes=[0])
    error = failure(lambda: ModelRunner(config, open_checkpoint(str(folder)), torch.device("cpu"), TensorParallelGroup()))
    assert is_permanent(error)
    assert describe(error) == "--cuda-graph-sizes are numbers of requests, at least 1, not [0]"


@pytest.mark.parametrize(("num_ranks", "num_gpus"), [(1, 0), (4, 2)])
def test_fewer_gpus_than_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_gpus: int) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    config = make_config(folder)
    config.model.device, config.parallel.tensor_parallel_size = "cuda", num_ranks
    error = failure(lambda: make_runner(config, 0, ""))
    assert is_permanent(error)
    assert describe(error) == f"each rank takes a GPU of its own: {num_ranks} wanted, torch finds {num_gpus}"


def test_only_checkpoint_and_configuration_are_at_fault_for_good() -> None:
    for error in (CheckpointError("why"), UnsupportedConfiguration("why")):
        assert is_permanent(error) and describe(error) == "why"
    for error in (ValueError("why"), RuntimeError("why"), MemoryError("why")):
        assert not is_permanent(error) and describe(error) == f"{type(error).__name__}: why"
