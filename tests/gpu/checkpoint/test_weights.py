"""Checkpoints: safetensors directories, shards, dummy weights, and what is said about a path that is none."""

from __future__ import annotations

import json
import logging
import os
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
from gpu.checkpoint.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling
from gpu.checkpoint.weights import DummyCheckpoint, open_checkpoint
from gpu.errors import CheckpointError
from gpu.models.rotary import RotaryEmbedding
from tests.gpu.checkpoint.gguf_files import HEADS, HIDDEN, KV_HEADS, LAYERS, MIDDLE, VOCAB, hf_tensors, write_gguf

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
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


def test_a_gguf_file_and_its_conversion_by_transformers_have_the_same_weights(smollm2_gguf: Path, smollm2_hf: Path) -> None:
    """transformers' dequantization and row order, on the real model, bit for bit."""
    with open_checkpoint(str(smollm2_gguf)) as quantized, open_checkpoint(str(smollm2_hf)) as restored:
        assert quantized.names() == restored.names()
        for name in quantized.names():
            assert torch.equal(quantized.tensor(name, torch.float32), restored.tensor(name, torch.float32)), name
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


def _integers(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, name: tensors[name].astype(np.int8)}, folder / "model.safetensors")

    return change


def _index(content: str) -> Callable[[Path], None]:
    """The weights in shards that `content` names, or does not."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "weights.safetensors")
        (folder / "model.safetensors.index.json").write_text(content)

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
    (_index("{}"), "index.json has no weight_map; it must be an object that names for each tensor a file"),
    (_index('{"weight_map": {}}'), "index.json: weight_map is {}, but must be an object"),
    (_index('{"weight_map": {"a": "../b.safetensors"}}'), "weight_map is .* but must be an object that names"),
    (_index('{"weight_map": {"a": "b", "c": 3}}'), "weight_map is .* but must be"),
    (_index('{"weight_map": {"a": "gone.safetensors"}}'), "index.json names the weights file gone.safetensors, which is missing"),
    (_index("{"), "index.json cannot be read"),
    (_index("[" * 100_000), "index.json cannot be read"),
    (lambda folder: (folder / "config.json").write_bytes(b'{"a": "\xff"}'), "config.json cannot be read"),
    (lambda folder: os.truncate(folder / "config.json", 1 << 40), "config.json has more than 67,108,864 bytes"),
    (_integers("model.norm.weight"), "tensor model.norm.weight of .* has type I8; only F64"),
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
    (_configure(hidden_size=None), "config.json has no hidden_size; it must be an integer from 1"),
    (_configure(hidden_size=64.0), "config.json: hidden_size is 64.0, but must be an integer"),
    (_configure(num_hidden_layers=0), "num_hidden_layers is 0, but must be an integer from 1 to 4,096"),
    (_configure(head_dim=15), "even head_dim"),
    (_configure(head_dim=0), "config.json: head_dim is 0, but must be an integer from 2"),
    (_configure(num_key_value_heads=True), "num_key_value_heads is true, but must be an integer"),
    (_configure(tie_word_embeddings="yes"), 'tie_word_embeddings is "yes", but must be true or false'),
    (_configure(architectures="LlamaForCausalLM"), 'architectures is "LlamaForCausalLM", but must be a list, each item text'),
    (_configure(rms_norm_eps="1e-5"), 'rms_norm_eps is "1e-5", but must be a number from 0 to 1'),
    (_configure(rope_theta=0), "rope_theta is 0, but must be a number above 1"),
    (_configure(rope_scaling="yarn"), 'config.json: rope_scaling is "yarn", but must be an object'),
    (_configure(rope_scaling={"type": "linear"}), r"config.json has no rope_scaling\.factor; it must be a number above 0"),
    (_configure(rope_scaling={"type": "yarn"}), r"config.json has no rope_scaling\.factor; it must be a number above 0"),
    (_configure(rope_parameters={"rope_type": "llama3", "factor": 8}), r"has no rope_parameters\.low_freq_factor"),
    (_configure(rope_scaling={**LLAMA3_ROPE, "high_freq_factor": 1.0}), "high_freq_factor is 1.0, but must be above"),
    (_configure(rope_scaling={**LLAMA3_ROPE, "factor": "8"}), r'rope_scaling\.factor is "8", but must be a number'),
    (_configure(rope_scaling={**LLAMA3_ROPE, "original_max_position_embeddings": 0}), "original_max_position_embeddings is 0, but"),
    (_configure(rope_parameters={"full_attention": {"rope_type": "default"}}), r"rope_parameters\.full_attention is of some"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_broken_directory_is_refused_with_its_reason(change: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "model")
    change(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(str(folder))
    assert "\n" not in str(error.value)


def test_an_empty_directory_and_a_stray_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a model directory"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "model.txt").write_text("not a model, but long enough for a header")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        open_checkpoint(str(tmp_path / "model.txt"))


@pytest.mark.parametrize("index", ['{"weight_map": {"model.norm.weight": "gone.safetensors"}}', "{}", "no JSON"])
def test_an_index_that_leads_nowhere_is_ignored_beside_the_whole(
    index: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_directory(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(index)
    with open_checkpoint(str(folder)) as checkpoint:
        assert np.array_equal(checkpoint.tensor("model.norm.weight", torch.float32), hf_tensors("llama")["model.norm.weight"])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "model.safetensors.index.json" in warning and warning.endswith("model.safetensors is read instead")


def test_no_single_wrong_byte_of_safetensors_does_more_than_refuse(tmp_path: Path) -> None:
    """Whatever the byte of the header, the model opens, or is refused with the file's name."""
    folder = write_directory(tmp_path / "model")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    refused = 0
    for position in [*range(8), *np.random.default_rng(0).permutation(np.arange(8, size))[:200].tolist()]:
        for value in (0, 255, ord("9"), ord("-")):
            path.write_bytes(content[:position] + bytes([value]) + content[position + 1 :])
            try:
                with open_checkpoint(str(folder)) as checkpoint:
                    checkpoint.tensor("model.norm.weight", torch.float32)
            except CheckpointError as error:
                refused += 1
                assert str(folder) in str(error)
    assert refused > 400


KINDS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
NASTY = [0, -1, 1, 3, 2.0, 1.5, 1e300, float("nan"), float("inf"), "", "x", True, False, [], [None], {}, {"a": {}}]
NASTY += [1 << 40, 1 << 70]


def test_no_value_of_the_configuration_does_more_than_refuse() -> None:
    """Whatever a field's value is, the model can be made, or is refused with the field's name."""
    plain = {
        **CONFIG,
        "model_type": "qwen2",
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "sliding_window": 9,
        "use_sliding_window": True,
        "max_window_layers": 0,
        "partial_rotary_factor": 1.0,
        **dict.fromkeys(("attention_bias", "mlp_bias"), False),
        **dict.fromkeys(("quantization_config", "rope_parameters", "rope_scaling")),
    }
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
    yarn |= {"truncate": True, "attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4}
    scalings = [yarn, LLAMA3_ROPE, {"type": "linear", "factor": 2.0}]
    cases = [(name, {**plain, "architectures": [kind], name: value}) for kind in KINDS for name in plain for value in NASTY]
    cases += [
        (name, {**CONFIG, "rope_scaling": {**scaling, name: value}}) for scaling in scalings for name in scaling for value in NASTY
    ]
    refused = 0
    for name, values in cases:
        try:
            config = ArchitectureConfig.from_hf_config(values, "the/config.json")
            RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling, torch.device("cpu"))
        except CheckpointError as error:
            refused += 1
            assert str(error).startswith("the/config.json") and "\n" not in str(error), (name, error)
    assert refused > 600


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
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
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": LinearScaling(2.0)}),
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
        ({"rope_scaling": LLAMA3_ROPE}, {"rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 64)}),
        ({"rope_scaling": {"rope_type": "dynamic"}}, {"rope_scaling": None}),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 32, "truncate": False, "attention_factor": 1.5}},
            {"rope_scaling": YarnScaling(4.0, 32, truncate=False, magnitude=1.5)},
        ),
        ({"head_dim": None, "num_key_value_heads": None}, {"head_dim": 16, "num_kv_heads": 4}),
    ],
)
def test_fields_of_configurations_are_read(config: dict[str, Any], expected: dict[str, Any]) -> None:
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
