"""Small GGUF files for tests, written by llama.cpp's own Python writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, MIDDLE, HEADS, KV_HEADS, LAYERS, VOCAB = 64, 96, 4, 2, 2, 40
HEAD_DIM = HIDDEN // HEADS


def hf_tensors(architecture: str, seed: int = 0, tied: bool = True) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names, in its order of rows."""
    random = np.random.default_rng(seed)
    layer = {
        "input_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.gate_proj.weight": (MIDDLE, HIDDEN),
        "mlp.up_proj.weight": (MIDDLE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, MIDDLE),
    }
    if architecture == "qwen2":
        layer |= {
            "self_attn.q_proj.bias": (HIDDEN,),
            "self_attn.k_proj.bias": (KV_HEADS * HEAD_DIM,),
            "self_attn.v_proj.bias": (KV_HEADS * HEAD_DIM,),
        }
    if architecture == "qwen3":
        layer |= {"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)}
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    shapes |= {f"model.layers.{index}.{name}": shape for index in range(LAYERS) for name, shape in layer.items()}
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def llama_cpp_order(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the query and key projections of llama models (`permute` in convert_hf_to_gguf.py)."""
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path: Path,
    architecture: str = "llama",
    tensors: dict[str, np.ndarray] | None = None,
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
    tensors_a_part: int = 0,
) -> Path:
    """`types`: quantization by Hugging Face name; `metadata`: keys to add or change; `extra`: tensors under llama.cpp's names;
    `tensors_a_part`: above 0, the model is split, and the first part's path is returned."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA if architecture != "qwen3" else gguf.MODEL_ARCH.QWEN3, LAYERS)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_a_part)
    fields: dict[str, Any] = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": MIDDLE,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        **(metadata or {}),
    }
    for key, value in fields.items():
        if key in without:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, values in (hf_tensors(architecture) if tensors is None else tensors).items():
        if name in without:
            continue
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = llama_cpp_order(values, HEADS if ".q_proj." in name else KV_HEADS)
        kind = (types or {}).get(name, gguf.GGMLQuantizationType.F32)
        stored = values if kind is gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(values, kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), stored, raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if tensors_a_part else path
