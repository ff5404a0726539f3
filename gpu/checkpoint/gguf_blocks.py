"""Quantized blocks to float32, or to codes, scales and minima: the GGUF types that llama.cpp's common quantizations are made of.

Dequantization is the `gguf` package's, which llama.cpp's authors keep equal to ggml's own; golden values are in the tests. Layouts
of blocks as in ggml's `ggml-common.h`. Torch-free.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from kernels.cpu.quantized_blocks import Blocks, Scales

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


def in_blocks(type: GGMLQuantizationType) -> bool:
    """Whether the type's elements share scales."""
    return type.name in _SPLITTERS


def split_blocks(blocks: NDArray[np.uint8], type: GGMLQuantizationType) -> Blocks | None:
    """[rows, bytes] of whole blocks, taken apart and not computed with; None for a type whose elements stand alone."""
    if not in_blocks(type):
        return None
    _, block_bytes = GGML_QUANT_SIZES[type]
    rows = len(blocks)
    codes, bits, scales, minima = _SPLITTERS[type.name](np.ascontiguousarray(blocks).reshape(-1, block_bytes))
    return Blocks(codes.reshape(rows, -1), bits, _by_rows(scales, rows), None if minima is None else _by_rows(minima, rows))


# Codes [blocks, elements], their bits, scales and minima, of a list of blocks.
_Split = tuple[NDArray[np.uint8], int, Scales, Scales | None]


def _by_rows(scales: Scales, rows: int) -> Scales:
    """Those of blocks, one after the other, as those of the rows that the blocks are of."""
    factors = None if scales.factors is None else np.ascontiguousarray(scales.factors, np.float32).reshape(rows, -1)
    return Scales(np.ascontiguousarray(scales.numbers, np.float32).reshape(rows, -1), factors)


def _halves(blocks: NDArray[np.uint8], begin: int) -> NDArray[np.float32]:
    """The float16 at byte `begin` of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., n] bytes to [..., 2 n]: all low halves, then all high ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


def _fifth_bits(blocks: NDArray[np.uint8], begin: int) -> NDArray[np.uint8]:
    """A bit an element of 32, from the 4 bytes at `begin`, as 16 or 0."""
    return np.unpackbits(blocks[:, begin : begin + 4], axis=1, bitorder="little") << np.uint8(4)


def _split_q4_0(blocks: NDArray[np.uint8]) -> _Split:
    return _nibbles(blocks[:, 2:18]), 4, Scales(_halves(blocks, 0)), None


def _split_q4_1(blocks: NDArray[np.uint8]) -> _Split:
    return _nibbles(blocks[:, 4:20]), 4, Scales(_halves(blocks, 0)), Scales(_halves(blocks, 2))


def _split_q5_0(blocks: NDArray[np.uint8]) -> _Split:
    return _nibbles(blocks[:, 6:22]) | _fifth_bits(blocks, 2), 5, Scales(_halves(blocks, 0)), None


def _split_q5_1(blocks: NDArray[np.uint8]) -> _Split:
    codes = _nibbles(blocks[:, 8:24]) | _fifth_bits(blocks, 4)
    return codes, 5, Scales(_halves(blocks, 0)), Scales(_halves(blocks, 2))


def _split_q8_0(blocks: NDArray[np.uint8]) -> _Split:
    return blocks[:, 2:34] ^ np.uint8(128), 8, Scales(_halves(blocks, 0)), None


def _k_scales(blocks: NDArray[np.uint8]) -> tuple[Scales, Scales]:
    """Scales and minima of Q4_K and Q5_K: eight whole numbers of 6 bits each, in 12 bytes behind their factors."""
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    return Scales(scales, _halves(blocks, 0)), Scales(minima, -_halves(blocks, 2))


def _split_q4_k(blocks: NDArray[np.uint8]) -> _Split:
    return _nibbles(blocks[:, 16:144].reshape(-1, 4, 32)), 4, *_k_scales(blocks)


def _split_q5_k(blocks: NDArray[np.uint8]) -> _Split:
    low = _nibbles(blocks[:, 48:176].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = (blocks[:, np.newaxis, 16:48] >> np.arange(8, dtype=np.uint8)[:, np.newaxis]) & np.uint8(1)
    return low | high << np.uint8(4), 5, *_k_scales(blocks)


def _split_q6_k(blocks: NDArray[np.uint8]) -> _Split:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, np.newaxis]
    high = (pairs & np.uint8(3)).reshape(-1, 8, 32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return low | high << np.uint8(4), 6, Scales(scales, _halves(blocks, 208)), None


_SPLITTERS = {
    "Q4_0": _split_q4_0,
    "Q4_1": _split_q4_1,
    "Q5_0": _split_q5_0,
    "Q5_1": _split_q5_1,
    "Q8_0": _split_q8_0,
    "Q4_K": _split_q4_k,
    "Q5_K": _split_q5_k,
    "Q6_K": _split_q6_k,
}
