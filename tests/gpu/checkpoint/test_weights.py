"""Checkpoints: safetensors directories, shards, dummy weights, and what is said about a path that is none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from gpu.checkpoint.architecture import ArchitectureConfig
from gpu.checkpoint.weights import DummyCheckpoint, open_checkpoint
from gpu.errors import CheckpointError
from tests.gpu.checkpoint.gguf_files import HEADS, HIDDEN, KV_HEADS, LAYERS, MIDDLE, VOCAB, hf_tensors, write_gguf

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def write_directory(folder: Path, config: dict[str, Any] | None = None, shards: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    tensors = hf_tensors("llama")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{index:05}-of-{shards:05}.safetensors" for index in range(shards)]
    weight_map = {tensor: names[number % shards] for number, tensor in enumerate(tensors)}
    for file in names:
        save_file({tensor: tensors[tensor] for tensor, its_file in weight_map.items() if its_file == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_a_directory_is_read_tensor_by_tensor(shards: int, tmp_path: Path) -> None:
    with open_checkpoint(str(write_directory(tmp_path / "model", shards=shards))) as checkpoint:
        tensors = hf_tensors("llama")
        assert set(checkpoint.names()) == set(tensors)
        for name, values in tensors.items():
            assert np.array_equal(checkpoint.tensor(name, torch.float32), values)


def test_a_shard_is_a_contiguous_copy(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "model")
    name = "model.layers.0.mlp.down_proj.weight"
    with open_checkpoint(str(folder)) as checkpoint:
        part = checkpoint.tensor(name, torch.bfloat16, rows=slice(10, 20), columns=slice(48, None))
        whole = checkpoint.tensor(name, torch.float32)
        vector = checkpoint.tensor("model.norm.weight", torch.float32, rows=slice(5, 9))
    (folder / "model.safetensors").write_bytes(bytes((folder / "model.safetensors").stat().st_size))
    expected = torch.from_numpy(hf_tensors("llama")[name])
    assert torch.equal(whole, expected)
    assert torch.equal(part, expected[10:20, 48:].bfloat16()) and part.is_contiguous()
    assert part.untyped_storage().nbytes() == part.numel() * 2
    assert np.array_equal(vector, hf_tensors("llama")["model.norm.weight"][5:9])


def test_the_same_weights_from_gguf_and_from_what_transformers_made_of_it(smollm2_gguf: Path, smollm2_hf: Path) -> None:
    """transformers' dequantization and row order, on the real model, bit for bit."""
    with open_checkpoint(str(smollm2_gguf)) as quantized, open_checkpoint(str(smollm2_hf)) as restored:
        assert quantized.names() == restored.names()
        for name in quantized.names():
            assert torch.equal(quantized.tensor(name, torch.float32), restored.tensor(name, torch.float32)), name
        assert quantized.config.eos_token_ids == restored.config.eos_token_ids
        assert quantized.config.rope_theta == restored.config.rope_theta
        assert quantized.config.head_dim == restored.config.head_dim


def test_loading_needs_little_more_memory_than_the_weights(smollm2_gguf: Path) -> None:
    code = (
        "import resource, sys, torch; from gpu.checkpoint.weights import open_checkpoint\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "checkpoint = open_checkpoint(sys.argv[1]); before = peak()\n"
        "kept = [checkpoint.tensor(name, torch.float32) for name in checkpoint.names()]\n"
        "print(peak() - before, sum(tensor.nbytes for tensor in kept))"
    )
    root = Path(__file__).parents[3]
    output = subprocess.run(
        [sys.executable, "-c", code, str(smollm2_gguf)], cwd=root, check=True, capture_output=True, text=True
    ).stdout
    used, kept = map(int, output.split())
    assert kept == 134_515_008 * 4
    assert used < kept + (48 << 20)


@pytest.mark.parametrize("make", [lambda path: write_directory(path), lambda path: write_gguf(path)])
def test_content_hash_is_of_the_content_alone(make: Callable[[Path], Path], tmp_path: Path) -> None:
    first = make(tmp_path / "first")
    second = tmp_path / "second"
    shutil.copytree(first, second) if first.is_dir() else shutil.copy(first, second)
    with open_checkpoint(str(first)) as one, open_checkpoint(str(second)) as other:
        assert one.content_hash() == other.content_hash()
        before = one.content_hash()
    weights = second / "model.safetensors" if second.is_dir() else second
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with open_checkpoint(str(second)) as changed:
        assert changed.content_hash() != before


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _write(name: str, content: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(content)


def _configure(**values: Any) -> Callable[[Path], Any]:
    return lambda folder: write_directory(folder, values)


def _cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1000])


def _without(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors")

    return change


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


WRONG = [
    (shutil.rmtree, "there is no model at"),
    (_remove("config.json"), "is not a model directory: it has no config.json"),
    (_write("config.json", "{"), "config.json cannot be read"),
    (_write("config.json", "[]"), "config.json is not a JSON object"),
    (_remove("model.safetensors"), "has no weights: neither model.safetensors nor"),
    (_pickled, "has its weights in pickled PyTorch files"),
    (_write("model.safetensors", "x"), "cannot be opened: damaged or cut off"),
    (_cut, "cannot be opened: damaged or cut off"),
    (_write("model.safetensors.index.json", "{}"), "has no weight_map"),
    (
        _write("model.safetensors.index.json", '{"weight_map": {"a": "gone.safetensors"}}'),
        "gone.safetensors cannot be opened: it is missing",
    ),
    (_without("model.norm.weight"), "has no tensor 'model.norm.weight', which a llama model of its configuration needs"),
    (_configure(intermediate_size=95), r"has shape \[96, 64\], but its configuration asks for \[95, 64\]"),
    (_configure(tie_word_embeddings=False), "has no tensor 'lm_head.weight'"),
    (
        _configure(architectures=["MambaForCausalLM"]),
        r"architecture \(MambaForCausalLM\) is not supported; headrace runs LlamaForCausalLM, ",
    ),
    (_configure(architectures=None, model_type="bert"), r"architecture \(bert\) is not supported"),
    (_configure(quantization_config={"quant_method": "awq"}), "safetensors quantized by 'awq' are not supported"),
    (_configure(hidden_act="gelu"), "activation 'gelu' is not supported"),
    (_configure(mlp_bias=True), "mlp_bias"),
    (_configure(partial_rotary_factor=0.5), "partial_rotary_factor"),
    (_configure(rope_scaling={"rope_type": "longrope"}), "rotary embedding of type 'longrope' is not supported"),
    (_configure(num_key_value_heads=3), "4 attention heads cannot share 3 key-value heads"),
    (_configure(hidden_size=None), "config.json has no usable 'hidden_size': None"),
    (_configure(rope_scaling="yarn"), "config.json has a value that cannot be read"),
    (_configure(eos_token_id=["2"]), "config.json has a value that cannot be read"),
    (_configure(num_hidden_layers=0), "num_layers must be a positive integer"),
    (_configure(head_dim=15), "even head_dim"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_wrong_with_a_directory_is_said(change: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "model")
    change(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(str(folder))
    assert "\n" not in str(error.value)


def test_an_empty_directory_and_a_stray_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a model directory"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "model.txt").write_text("not a model, but long enough for a header")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        open_checkpoint(str(tmp_path / "model.txt"))


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.int8)
    save_file(tensors, folder / "model.safetensors")
    with open_checkpoint(str(folder)) as checkpoint, pytest.raises(CheckpointError, match="has type I8; only F64"):
        checkpoint.tensor("model.norm.weight", torch.float32)


def test_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    with open_checkpoint(str(write_directory(tmp_path / "model"))) as checkpoint:
        with pytest.raises(CheckpointError, match=r"has no tensor 'lm_head\.weight'"):
            checkpoint.tensor("lm_head.weight", torch.float32)
        with pytest.raises(ValueError, match="cannot cut"):
            checkpoint.tensor("model.norm.weight", torch.float32, columns=slice(0, 3))
        with pytest.raises(ValueError, match="cannot cut"):
            checkpoint.tensor("model.embed_tokens.weight", torch.float32, rows=slice(0, 8, 2))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None}),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, {"rope_theta": 1e6, "rope_scaling": None}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ({"sliding_window": 32}, {"sliding_window": None}),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 32}, {"sliding_window": 32}),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, {"sliding_window": None}),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32},
            {"sliding_window": None, "attention_bias": True, "qk_norm": False},
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0},
            {"sliding_window": 32},
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 9},
            {"sliding_window": None},
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, {"qk_norm": True, "head_dim": 128, "attention_bias": False}),
        ({"attention_bias": True}, {"attention_bias": True, "attention_output_bias": True}),
        ({"eos_token_id": [1, 2]}, {"eos_token_ids": (1, 2)}),
        ({"eos_token_id": 7}, {"eos_token_ids": (7,)}),
        ({"eos_token_id": [39, VOCAB]}, {"eos_token_ids": (39,)}),
        ({"head_dim": None, "num_key_value_heads": None}, {"head_dim": 16, "num_kv_heads": 4}),
    ],
)
def test_configurations(config: dict[str, Any], expected: dict[str, Any]) -> None:
    read = ArchitectureConfig.from_hf_config({**CONFIG, **config})
    assert {name: getattr(read, name) for name in expected} == expected


def test_mixed_sliding_window_layers_are_refused() -> None:
    mixed = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}
    with pytest.raises(CheckpointError, match="mix sliding-window and full-attention layers"):
        ArchitectureConfig.from_hf_config({**CONFIG, **mixed})


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_shapes_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    import transformers

    sizes = {name: value for name, value in CONFIG.items() if isinstance(value, int)}
    config = getattr(transformers, f"{architecture}Config")(**sizes, head_dim=16)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    model.save_pretrained(tmp_path)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        state = model.state_dict()
        assert set(checkpoint.names()) == set(state) - {"lm_head.weight"}
        for name in checkpoint.names():
            assert torch.equal(checkpoint.tensor(name, torch.float32), state[name])


def test_end_tokens_of_the_generation_config_win(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "model", {"eos_token_id": 2})
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9], "temperature": 0.5}')
    with open_checkpoint(str(folder)) as checkpoint:
        assert checkpoint.config.eos_token_ids == (2, 9)


def test_dummy_weights_are_the_same_in_any_shard() -> None:
    checkpoint = DummyCheckpoint(ArchitectureConfig.from_hf_config(CONFIG), seed=3)
    assert set(checkpoint.names()) == set(hf_tensors("llama"))
    for name in ("model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"):
        whole = checkpoint.tensor(name, torch.float32)
        for rows in (slice(0, 7), slice(7, 33), slice(33, None)):
            for columns in (slice(0, 21), slice(21, None)):
                assert torch.equal(checkpoint.tensor(name, torch.float32, rows, columns), whole[rows, columns])


def test_dummy_weights_keep_activations_at_unit_scale() -> None:
    checkpoint = DummyCheckpoint(ArchitectureConfig.from_hf_config(CONFIG), seed=3)
    weights = checkpoint.tensor("model.layers.1.mlp.up_proj.weight", torch.float32)
    assert weights.std() * HIDDEN**0.5 == pytest.approx(1, abs=0.05)
    assert abs(float(weights.mean())) * HIDDEN**0.5 < 0.05
    assert torch.equal(checkpoint.tensor("model.norm.weight", torch.float32), torch.ones(HIDDEN))
    other = DummyCheckpoint(checkpoint.config, seed=4)
    assert not torch.equal(weights, other.tensor("model.layers.1.mlp.up_proj.weight", torch.float32))
    assert checkpoint.content_hash() != other.content_hash()
    assert checkpoint.content_hash() == DummyCheckpoint(checkpoint.config, seed=3).content_hash()
