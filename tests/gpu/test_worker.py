"""Which failures of a worker no new start mends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from gpu.checkpoint.weights import open_checkpoint
from gpu.distributed import TensorParallelGroup
from gpu.errors import CheckpointError, UnsupportedConfiguration
from gpu.numerics import Numerics
from gpu.runner.runner import ModelRunner
from gpu.worker import describe, is_permanent, make_runner
from tests.gpu.checkpoint.gguf_files import write_gguf
from tests.gpu.engine_stub import make_config
from tests.gpu.engine_stub import make_runner as make_stub_runner
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


def test_quantization_on_a_gpu_is_refused_for_good() -> None:
    error = failure(lambda: Numerics.choose("auto", "int8", torch.device("cuda")))
    assert is_permanent(error)
    assert describe(error) == "--quantization int8 is for the CPU; this engine runs on cuda"


def test_graph_sizes_are_checked_before_anything_is_loaded(folder: Path) -> None:
    config = make_config(folder, cuda_graph_sizes=[0])
    error = failure(lambda: ModelRunner(config, open_checkpoint(str(folder)), torch.device("cpu"), TensorParallelGroup()))
    assert is_permanent(error)
    assert describe(error) == "--cuda-graph-sizes are numbers of requests, at least 1, not [0]"


@pytest.mark.parametrize(("num_ranks", "num_gpus"), [(1, 0), (4, 2)])
def test_fewer_gpus_than_ranks_are_refused_for_good(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_gpus: int
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    config = make_config(folder)
    config.model.device, config.parallel.tensor_parallel_size = "cuda", num_ranks
    error = failure(lambda: make_runner(config, 0, ""))
    assert is_permanent(error)
    assert describe(error) == f"each rank takes a GPU of its own: {num_ranks} wanted, torch finds {num_gpus}"


def test_only_checkpoint_and_configuration_errors_are_permanent() -> None:
    for error in (CheckpointError("why"), UnsupportedConfiguration("why")):
        assert is_permanent(error) and describe(error) == "why"
    for error in (ValueError("why"), RuntimeError("why"), MemoryError("why")):
        assert not is_permanent(error) and describe(error) == f"{type(error).__name__}: why"


def chosen_class(model: Path, num_ranks: int = 1, **options: str) -> str:
    config = make_config(model, **{"dtype": "auto", **options})
    with open_checkpoint(str(model)) as checkpoint:
        return str(ModelRunner(config, checkpoint, torch.device("cpu"), TensorParallelGroup(0, num_ranks)).numerics)


def test_a_quantized_file_is_computed_in_its_own_blocks_by_default(
    folder: Path, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kernels.cpu.pairs.is_fast", lambda: True)
    assert chosen_class(smollm2_gguf) == "gguf-float16"
    assert chosen_class(smollm2_gguf, dtype="float32") == "float32"
    assert chosen_class(smollm2_gguf, quantization="none") == chosen_class(folder) == "bfloat16"
    assert chosen_class(smollm2_gguf, num_ranks=3) == "gguf-float16"  # 576 and 1536 columns are 6 and 16 whole blocks a rank
    assert not caplog.records
    assert chosen_class(smollm2_gguf, num_ranks=5) == "bfloat16"
    assert "instead of the file's own blocks, through which 5 ranks would cut" in caplog.text


def test_matrices_without_blocks_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [f"model.layers.{layer}.mlp.{name}_proj.weight" for layer in range(2) for name in ("gate", "up", "down")]
    model = write_gguf(tmp_path / "model.gguf", types=dict.fromkeys(names, GGMLQuantizationType.Q8_0))
    runner = make_stub_runner(make_config(model, dtype="auto"))
    assert str(runner.numerics) == "gguf-float16"
    # queries, keys, values and output of two layers, and the embedding
    assert "9 matrices (model.embed_tokens.weight, ...) are kept as torch.float16: the file has no blocks of them" in caplog.text
