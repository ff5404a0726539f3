"""What a GGUF file says of its model, in Hugging Face's terms: configuration, tensor names, order of rows. Torch-free."""

from __future__ import annotations

import math
import struct
from typing import Any

from gguf.constants import GGMLQuantizationType

from gpu.checkpoint.architecture import ARCHITECTURES
from gpu.checkpoint.gguf import GGUFFile
from gpu.errors import CheckpointError

_HF_ARCHITECTURES = {ours: hf for hf, ours in ARCHITECTURES.items()}  # llama.cpp's names are headrace's
_PERMUTED = ("llama", "mistral")  # llama.cpp pairs rotary dimensions (2i, 2i+1) here, Hugging Face (i, i + head_dim / 2) everywhere

# Llama 3.1 and later: the only constants released; the file has just the resulting factors
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")

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
    head_dim = _number(file, "attention.key_length", hidden // heads)
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
        "eos_token_id": end_token_ids(file),
    }
    if _number(file, "rope.dimension_count", head_dim) != head_dim:
        config["partial_rotary_factor"] = _number(file, "rope.dimension_count") / head_dim
    return config


def end_token_ids(file: GGUFFile) -> list[int]:
    """Tokens that end a generation: end of sequence, of turn and of message, as the metadata names them.

    Older files name only the first; a known end-of-turn token that the chat template writes after each turn counts too.
    """
    metadata = file.metadata
    named = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens, template = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.chat_template", "")
    found = [token for token in named if token is not None and token < len(tokens)]
    found += [tokens.index(token) for token in _END_OF_TURN if token in template and token in tokens]
    return list(dict.fromkeys(found))


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
