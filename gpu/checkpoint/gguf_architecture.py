"""A GGUF file's description of its model, in headrace's terms: configuration, tensor names, order of rows. Torch-free."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

from gguf.constants import GGMLQuantizationType

from gpu.checkpoint.architecture import ARCHITECTURES, EPSILON, HEAD_DIM, HEADS, LAYERS, WIDTH, ArchitectureConfig
from gpu.checkpoint.fields import TEXT, Fields, integer, number
from gpu.checkpoint.gguf import GGUFFile
from gpu.checkpoint.rope_scaling import FACTOR, POSITIONS, THETA, LinearScaling, Llama3Scaling, RopeScaling, yarn_scaling
from gpu.errors import CheckpointError

_PERMUTED = ("llama", "mistral")  # llama.cpp pairs rotary dimensions (2i, 2i+1) here, Hugging Face (i, i + head_dim / 2) everywhere
_OF_LAYERS = {
    "attention.head_count",
    "attention.head_count_kv",
    "feed_forward_length",
}  # one value, or a list with one for each layer

_EXPERTS = integer(0, 1 << 16)
_FACTOR = number(0, 1e6)  # 0: none
_ORIGINAL_LENGTH = integer(0, 2**31 - 1)  # 0: the model's own

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


def architecture_config(file: GGUFFile) -> ArchitectureConfig:
    """Raises CheckpointError where headrace cannot run the file's model."""
    architecture = file.architecture
    kind = file.fields.get("general.type", TEXT)
    if kind not in (None, "model"):
        raise CheckpointError(f"{file.path} is not a model but a GGUF file of type {kind!r}")
    if architecture not in ARCHITECTURES.values():
        known = ", ".join(ARCHITECTURES.values())
        raise CheckpointError(
            f"{file.path} has architecture {architecture!r}, which is not supported; headrace runs {known} GGUF files"
        )
    fields = _model_fields(file)
    if fields.get("expert_count", _EXPERTS):
        raise CheckpointError(f"{file.path} is a mixture of experts, which is not supported yet")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no weights (token_embd.weight is missing): is it a vocabulary-only file?")
    num_heads, hidden_size = fields.need("attention.head_count", HEADS), fields.need("embedding_length", WIDTH)
    head_dim = fields.get("attention.key_length", HEAD_DIM) or hidden_size // num_heads
    if (fields.get("rope.dimension_count", HEAD_DIM) or head_dim) != head_dim:
        raise CheckpointError(f"{file.path}: partial rotary embedding ({fields.path}rope.dimension_count) is not supported")
    max_positions = fields.need("context_length", POSITIONS)
    theta = fields.get("rope.freq_base", THETA) or 10000.0
    return ArchitectureConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.need("feed_forward_length", WIDTH),
        num_layers=fields.need("block_count", LAYERS),
        num_heads=num_heads,
        num_kv_heads=fields.get("attention.head_count_kv", HEADS) or num_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.need("attention.layer_norm_rms_epsilon", EPSILON),
        rope_theta=theta,
        max_position_embeddings=max_positions,
        rope_scaling=_rope_scaling(file, fields, head_dim, theta, max_positions),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
    ).checked(str(file.path))


def _model_fields(file: GGUFFile) -> Fields:
    """The metadata under the architecture's name. A value that is given for each layer stands for itself where all are equal."""
    prefix = f"{file.architecture}."
    values = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    for key in _OF_LAYERS & values.keys():
        if isinstance(values[key], list) and values[key]:
            first, *others = values[key]
            if any(other != first for other in others):
                raise CheckpointError(f"{file.path} has layers that differ in {prefix}{key}, which is not supported")
            values[key] = first
    return Fields(str(file.path), values, prefix)


def _rope_scaling(file: GGUFFile, fields: Fields, head_dim: int, theta: float, max_positions: int) -> RopeScaling | None:
    """The scaling of `rope.scaling.*`, or of the frequency factors that Llama 3 files carry as a tensor."""
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, head_dim, theta)
    if any(name in file.tensors for name in ("rope_factors_long.weight", "rope_factors_short.weight")):
        raise CheckpointError(f"{file.path} uses LongRoPE, which is not supported")
    kind = fields.get("rope.scaling.type", TEXT) or "none"
    factor = fields.get("rope.scaling.factor", _FACTOR) or fields.get("rope.scale_linear", _FACTOR)
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if kind == "linear" and factor:
        return LinearScaling(factor)
    if kind != "yarn":
        raise CheckpointError(f"{file.path} scales its rotary embedding by {kind!r}, which is not supported")
    return yarn_scaling(factor, fields.get("rope.scaling.original_context_length", _ORIGINAL_LENGTH), max_positions)


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> Llama3Scaling:
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.type is not GGMLQuantizationType.F32 or tensor.shape != (head_dim // 2,):
        raise CheckpointError(f"rope_freqs.weight of {file.path} is not {head_dim // 2} float32 factors")
    factors = struct.unpack(f"<{head_dim // 2}f", file.read_rows(tensor, 0, 1))
    # the only constants released; the file has just the resulting factors
    if not FACTOR.accepts(max(factors)):
        raise CheckpointError(
            f"rope_freqs.weight of {file.path} has a factor of {max(factors)}, but must have {FACTOR.description}"
        )
    scaling = Llama3Scaling(round(max(factors), 4), low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)
    expected = _llama3_factors(scaling, theta, head_dim)
    if any(not math.isclose(found, right, rel_tol=1e-3) for found, right in zip(factors, expected, strict=True)):
        raise CheckpointError(f"{file.path} has rotary frequency factors that are not Llama 3's, which is not supported")
    return scaling


def _llama3_factors(scaling: Llama3Scaling, theta: float, head_dim: int) -> Iterator[float]:
    """The number by which each frequency is divided, as Llama 3.1's `apply_scaling` defines it."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        smooth = min(1.0, max(0.0, (scaling.original_length / wavelength - low) / (high - low)))
        yield 1 / ((1 - smooth) / scaling.factor + smooth)
