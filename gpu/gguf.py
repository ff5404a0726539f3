"""GGUF, llama.cpp's file format: metadata, tensor table and raw tensor rows. Torch-free.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic "GGUF", version, counts, key-value metadata, tensor table,
padding, tensor data. The header is read here rather than by the `gguf` package, whose reader makes several numpy arrays for every
token of the vocabulary (2 s for 49,152 tokens, against 70 ms); types and their sizes are the package's.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from gpu.errors import CheckpointError

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# metadata value type -> struct format
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class TensorInfo:
    """One line of the tensor table. A row is the contiguous innermost dimension: a whole number of quantization blocks."""

    name: str  # llama.cpp's: "blk.0.attn_q.weight"
    shape: tuple[int, ...]  # numpy's order: [rows, columns] or [columns]
    type: GGMLQuantizationType
    offset: int  # bytes from the start of the file

    @property
    def block_size(self) -> int:
        """Elements in a quantization block."""
        return int(GGML_QUANT_SIZES[self.type][0])

    @property
    def row_bytes(self) -> int:
        block_size, block_bytes = GGML_QUANT_SIZES[self.type]
        return int(self.shape[-1] // block_size * block_bytes)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


class GGUFFile:
    """An open file. Its header is read and checked against the file's length; tensor data is read on demand.

    Raises CheckpointError when the file is not GGUF, damaged or cut off.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            self._file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"the model file {path} cannot be opened: {error.strerror}") from None
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.metadata, self.tensors, self.header_bytes = self._read_header()
            self._check_extent()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture, which also begins the keys of its metadata."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise CheckpointError(f"{self.path} does not say its architecture (general.architecture)")
        return name

    def read(self, offset: int, size: int) -> bytearray:
        """`size` bytes from `offset` of the file."""
        buffer = bytearray(size)
        view, done = memoryview(buffer), 0
        while done < size:
            count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            if count == 0:
                raise CheckpointError(f"{self.path} ended early: it was changed while it was read")
            done += count
        return buffer

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> bytearray:
        """Raw blocks of rows start..stop-1; a vector is one row."""
        return self.read(tensor.offset + start * tensor.row_bytes, (stop - start) * tensor.row_bytes)

    def _read_header(self) -> tuple[dict[str, Any], dict[str, TensorInfo], int]:
        if self.size < 24:
            raise CheckpointError(f"{self.path} is not a GGUF file: it has {self.size} bytes")
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            cursor = _Cursor(content)
            if content[:4] != b"GGUF":
                raise CheckpointError(f"{self.path} is not a GGUF file: it does not begin with the letters GGUF")
            cursor.position = 4
            version = cursor.scalar("I")
            if version & 0xFFFF == 0:
                raise CheckpointError(f"{self.path} is a big-endian GGUF file, which is not supported")
            if version not in _VERSIONS:
                raise CheckpointError(
                    f"{self.path} is GGUF version {version}; versions {_VERSIONS[0]} and {_VERSIONS[1]} are supported"
                )
            try:
                num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
                metadata = {}
                for _ in range(num_fields):
                    key = cursor.string()
                    metadata[key] = cursor.value(cursor.scalar("I"))
                table = [_tensor_line(cursor) for _ in range(num_tensors)]
            except (struct.error, EOFError):
                raise CheckpointError(f"{self.path} is cut off: it ends inside its header") from None
            except ValueError as error:
                raise CheckpointError(f"the header of {self.path} is damaged: {error}") from None
            header_bytes = cursor.position
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"the header of {self.path} is damaged: alignment {alignment!r}")
        data_start = -(-header_bytes // alignment) * alignment
        tensors = {}
        for name, shape, type_number, offset in table:
            tensors[name] = TensorInfo(name, shape, _tensor_type(type_number, name, self.path), data_start + offset)
        return metadata, tensors, header_bytes

    def _check_extent(self) -> None:
        for tensor in self.tensors.values():
            if tensor.shape[-1] % tensor.block_size:
                raise CheckpointError(
                    f"tensor {tensor.name} of {self.path} has rows of {tensor.shape[-1]}, not a multiple of its block size"
                )
        end = max((tensor.offset + tensor.num_bytes for tensor in self.tensors.values()), default=0)
        if end > self.size:
            raise CheckpointError(f"{self.path} is cut off: it has {self.size:,} bytes of {end:,}; download it again")
        part_count = self.metadata.get("split.count", 1)
        if part_count > 1:
            raise CheckpointError(f"{self.path} is one of {part_count} parts of a model; join them with `llama-gguf-split --merge`")


class _Cursor:
    """Reads little-endian values one after the other; raises EOFError or struct.error at the end of the content."""

    def __init__(self, content: mmap.mmap):
        self.content = content
        self.position = 0

    def scalar(self, format: str) -> Any:
        (value,) = struct.unpack_from("<" + format, self.content, self.position)
        self.position += struct.calcsize("<" + format)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        start, self.position = self.position, self.position + length
        if self.position > len(self.content):
            raise EOFError
        return self.content[start : self.position].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.scalar("I"), self.scalar("Q")
            if count > len(self.content):  # an item has at least a byte: do not trust a count that cannot be
                raise EOFError
            if item_kind in _SCALARS:
                return self._scalars(_SCALARS[item_kind], count)
            return [self.value(item_kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"unknown metadata type {kind}")
        return self.scalar(_SCALARS[kind])

    def _scalars(self, format: str, count: int) -> list[Any]:
        values = struct.unpack_from(f"<{count}{format}", self.content, self.position)
        self.position += struct.calcsize(f"<{count}{format}")
        return list(values)


def _tensor_line(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dimensions = cursor.scalar("I")
    if not 1 <= num_dimensions <= 4:
        raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
    shape = tuple(reversed([cursor.scalar("Q") for _ in range(num_dimensions)]))
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _tensor_type(number: int, name: str, path: Path) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(number)
    except ValueError:
        raise CheckpointError(f"tensor {name} of {path} has a type that is not known here (number {number})") from None


# --- what the metadata says of the model, in Hugging Face's terms ---

_HF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_PERMUTED = ("llama", "mistral")  # llama.cpp pairs rotary dimensions (2i, 2i+1) here, Hugging Face (i, i + head_dim / 2) everywhere

# Llama 3.1 and later: the only constants released; the file has just the resulting factors
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.bias": "attn_output.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_OTHER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(hf_name: str) -> str:
    """llama.cpp's name of a tensor: "model.layers.3.mlp.up_proj.weight" is "blk.3.ffn_up.weight"."""
    if hf_name in _OTHER_NAMES:
        return _OTHER_NAMES[hf_name]
    layer, _, rest = hf_name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_NAMES[rest]}"


def permuted_heads(file: GGUFFile, hf_name: str, num_heads: int, num_kv_heads: int) -> int:
    """How many heads' rows llama.cpp reordered in this tensor: of the query and key projections of llama-like files, else 0."""
    if file.architecture not in _PERMUTED:
        return 0
    if ".q_proj." in hf_name:
        return num_heads
    return num_kv_heads if ".k_proj." in hf_name else 0


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The file's architecture as the config.json it was made from. Raises CheckpointError where headrace cannot run it."""
    architecture = file.architecture
    if file.metadata.get("general.type", "model") != "model":
        raise CheckpointError(f"{file.path} is not a model but a GGUF file of type {file.metadata['general.type']!r}")
    if architecture not in _HF_ARCHITECTURES:
        known = ", ".join(_HF_ARCHITECTURES)
        raise CheckpointError(
            f"{file.path} has architecture {architecture!r}, which is not supported; headrace runs {known} GGUF files"
        )
    if file.metadata.get(f"{architecture}.expert_count"):
        raise CheckpointError(f"{file.path} is a mixture of experts, which is not supported yet")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no weights (token_embd.weight is missing): is it a vocabulary-only file?")
    heads, hidden = _number(file, "attention.head_count"), _number(file, "embedding_length")
    head_dim = _number(file, "attention.key_length", _number(file, "rope.dimension_count", hidden // heads))
    config = {
        "architectures": [_HF_ARCHITECTURES[architecture]],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _number(file, "feed_forward_length"),
        "num_hidden_layers": _number(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _number(file, "context_length"),
        "rope_theta": _number(file, "rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if _number(file, "rope.dimension_count", head_dim) != head_dim:
        config["partial_rotary_factor"] = _number(file, "rope.dimension_count") / head_dim
    return config


def _number(file: GGUFFile, key: str, default: Any = None) -> Any:
    full_key = f"{file.architecture}.{key}"
    value = file.metadata.get(full_key, default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise CheckpointError(f"{file.path} has layers that differ in {full_key}, which is not supported")
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"the metadata of {file.path} has no usable {full_key}: {value!r}")
    return value


def _rope_scaling(file: GGUFFile, head_dim: int) -> dict[str, Any] | None:
    """Hugging Face's rope_scaling out of `rope.scaling.*`, or out of the frequency factors that Llama 3 files carry as a tensor."""
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, head_dim)
    if any(name in file.tensors for name in ("rope_factors_long.weight", "rope_factors_short.weight")):
        raise CheckpointError(f"{file.path} uses LongRoPE, which is not supported")
    kind = file.metadata.get(f"{file.architecture}.rope.scaling.type", "none")
    factor = _number(file, "rope.scaling.factor", _number(file, "rope.scale_linear", 0.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise CheckpointError(f"{file.path} scales its rotary embedding by {kind!r}, which is not supported")
    scaling = {"rope_type": "yarn", "factor": factor}
    original = _number(file, "rope.scaling.original_context_length", 0)
    if original:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.type is not GGMLQuantizationType.F32 or tensor.shape != (head_dim // 2,):
        raise CheckpointError(f"rope_freqs.weight of {file.path} is not {head_dim // 2} float32 factors")
    factors = struct.unpack(f"<{head_dim // 2}f", file.read_rows(tensor, 0, 1))
    scaling = {"rope_type": "llama3", "factor": round(max(factors), 4), **_LLAMA3_ROPE}
    expected = _llama3_factors(scaling, _number(file, "rope.freq_base", 10000.0), head_dim)
    if any(not math.isclose(found, right, rel_tol=1e-3) for found, right in zip(factors, expected, strict=True)):
        raise CheckpointError(f"{file.path} has rotary frequency factors that are not Llama 3's, which is not supported")
    return scaling


def _llama3_factors(scaling: dict[str, Any], theta: float, head_dim: int) -> list[float]:
    """By how much each frequency is divided, as Llama 3.1's `apply_scaling` defines it."""
    original, low, high = scaling["original_max_position_embeddings"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return factors
