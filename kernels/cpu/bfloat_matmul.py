"""Product of rows with bfloat16 weights on the CPU: rows are rounded to bfloat16 too, products summed pair by pair in float32.

Where the processor multiplies pairs of bfloat16, a row costs half the multiplications of `half_matmul`; elsewhere as many.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.cpu.compiled import compiled
from kernels.cpu.math import narrow, widen
from kernels.cpu.pairs import PAIR
from kernels.cpu.panel_matmul import PANEL
from kernels.cpu.tiles import HALF_ROWS, num_panels, tile_rows


def pack_bfloat(weight: torch.Tensor) -> np.ndarray:
    """weight [out_features, in_features] bfloat16 in panels: [panels, pairs, PANEL] uint32, filled up with zeros."""
    out_features, in_features = weight.shape
    panels, pairs = num_panels(out_features, PANEL), num_pairs(in_features)
    padded = np.zeros((panels * PANEL, pairs * PAIR), np.uint16)
    padded[:out_features, :in_features] = weight.contiguous().view(torch.int16).numpy().view(np.uint16)
    return np.ascontiguousarray(padded.view(np.uint32).reshape(panels, PANEL, pairs).swapaxes(1, 2))


@compiled()
def num_pairs(columns):
    return (columns + PAIR - 1) // PAIR


def bfloat_rows(packed: np.ndarray, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` [n] int64 of the weight that was packed, as float32 [n, pairs * PAIR]."""
    out = np.empty((len(indices), packed.shape[1] * PAIR), np.float32)
    _take_rows(out, packed, indices.numpy())
    return torch.from_numpy(out)


@compiled()
def round_rows(packed, x):
    """x [rows, columns] rounded to bfloat16, tile by tile, pair by pair, the tile's rows beside each other."""
    rows, columns = x.shape
    pairs = num_pairs(columns)
    rounded = np.zeros((HALF_ROWS, pairs * PAIR), np.uint16)
    words = rounded.view(np.uint32)
    row = 0
    while row < rows:
        count = tile_rows(row, rows, HALF_ROWS)
        first = row * pairs
        for r in range(count):
            for i in range(columns):
                rounded[r, i] = narrow(x[row + r, i], rounded[r, i])
        for k in range(pairs):
            for r in range(count):
                packed[first + k * count + r] = words[r, k]
        row += count


@compiled()
def _take_rows(out, packed, indices):
    for i in range(len(indices)):
        panel, column = indices[i] // PANEL, indices[i] % PANEL
        for k in range(packed.shape[1]):
            word = packed[panel, k, column]
            out[i, PAIR * k] = widen(np.uint16(word & np.uint32(0xFFFF)))
            out[i, PAIR * k + 1] = widen(np.uint16(word >> np.uint32(16)))
