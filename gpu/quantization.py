"""Quantized blocks to float32: the GGUF types that llama.cpp's common quantizations are made of. Torch-free.

The arithmetic is the `gguf` package's, which llama.cpp's authors keep equal to ggml's own; golden values are in the tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

# A "K" file mixes several: rows that do not divide into blocks of 256 fall back to the types with blocks of 32.
SUPPORTED_TYPES = {
    GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
}


def dequantize(blocks: NDArray[np.uint8], type: GGMLQuantizationType) -> NDArray[np.float32]:
    """[rows, bytes] of whole blocks of a type in SUPPORTED_TYPES to [rows, elements]. May return a view of `blocks` (F32)."""
    if type is GGMLQuantizationType.F32:
        return blocks.view(np.float32)
    if type is GGMLQuantizationType.F16:
        return blocks.view(np.float16).astype(np.float32)
    values: NDArray[Any] = quants.dequantize(blocks, type)
    return values
