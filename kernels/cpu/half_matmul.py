"""Product of float32 rows with 16-bit weights on the CPU, summed in float32: weights are widened as they are loaded.

A row costs half the bytes of a float32 product, and as many multiplications.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.cpu.compiled import compiled
from kernels.cpu.math import widen
from kernels.cpu.panel_matmul import PANEL
from kernels.cpu.tiles import HALF_ROWS, num_panels, tile_rows


def pack_half(weight: torch.Tensor) -> np.ndarray:
    """weight [out_features, in_features] float16 in panels: [panels, in_features, PANEL] int16, its bits, filled up with zeros."""
    out_features, in_features = weight.shape
    panels = num_panels(out_features, PANEL)
    padded = np.zeros((panels * PANEL, in_features), np.int16)
    padded[:out_features] = weight.contiguous().view(torch.int16).numpy()
    return np.ascontiguousarray(padded.reshape(panels, PANEL, in_features).swapaxes(1, 2))


def half_rows(packed: np.ndarray, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` [n] int64 of the weight that was packed, as float32 [n, in_features]."""
    out = np.empty((len(indices), packed.shape[1]), np.float32)
    _take_rows(out, packed, indices.numpy())
    return torch.from_numpy(out)


@compiled()
def pack_rows(packed, x):
    """Tile by tile, input column by input column, the tile's rows beside each other."""
    rows, in_features = x.shape
    row = 0
    while row < rows:
        count = tile_rows(row, rows, HALF_ROWS)
        first = row * in_features
        for r in range(count):
            for k in range(in_features):
                packed[first + k * count + r] = x[row + r, k]
        row += count


@compiled()
def _take_rows(out, packed, indices):
    for i in range(len(indices)):
        panel, column = indices[i] // PANEL, indices[i] % PANEL
        for k in range(packed.shape[1]):
            out[i, k] = widen(packed[panel, k, column])
