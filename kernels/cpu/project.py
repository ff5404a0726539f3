"""Product of float32 rows with packed weights of every kind: rows are packed as the weights' kernel wants them, then multiplied."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from kernels.cpu import bfloat_matmul, block_matmul, crew, half_matmul, panel_matmul, rounded_rows
from kernels.cpu.compiled import compiled
from kernels.cpu.crew import pointer_to

_multiply_panels, _multiply_blocks = panel_matmul.multiply, block_matmul.multiply
_pack_rows, _round_rows, _num_pairs = half_matmul.pack_rows, bfloat_matmul.round_rows, bfloat_matmul.num_pairs
_quantize_rows, _SEGMENT_FIELDS = rounded_rows.quantize_rows, block_matmul.SEGMENT_FIELDS
_NO_SEGMENTS = np.zeros((0, _SEGMENT_FIELDS), np.int64)

# A weight's description: what compiled code must know of it, arrays by their addresses, so that one compiled function serves all.
_TYPE, _WEIGHT, _PANELS, _STEPS, _SEGMENTS, _NUM_SEGMENTS, _TASKS = range(7)
DESCRIPTION_FIELDS = 7
_HALF, _BFLOAT, _BLOCKS = range(3)
_TYPES = {"int16": _HALF, "uint32": _BFLOAT, "uint8": _BLOCKS}


@dataclass
class PackedWeight:
    """A weight [out_features, in_features], packed by `pack_half`, `pack_bfloat` or, with segments, by `pack_blocks`."""

    packed: NDArray[Any]
    out_features: int
    in_features: int
    segments: NDArray[np.int64] = field(default_factory=lambda: _NO_SEGMENTS)

    @functools.cached_property
    def description(self) -> NDArray[np.int64]:
        """[DESCRIPTION_FIELDS]; holds as long as this object does."""
        panels, steps = self.packed.shape[:2] if self.packed.ndim == 3 else (0, 0)
        addresses = (self.segments.ctypes.data, len(self.segments), self._tasks.ctypes.data)
        return np.array([_TYPES[self.packed.dtype.name], self.packed.ctypes.data, panels, steps, *addresses], np.int64)

    @functools.cached_property
    def _tasks(self) -> NDArray[np.int64]:
        if self.packed.dtype == np.uint8:
            return np.array([block_matmul.task(int(kind)) for kind in self.segments[:, 0]], np.int64)
        return np.array([panel_matmul.task(self.packed.dtype.name)], np.int64)


def matmul(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """x [rows, in_features] float32 times the weight: [rows, out_features] float32.

    x may have fewer columns than the weight has blocks for, whose last is then padded with zeros. NaN or infinity in a row makes
    its whole product with blocks NaN.
    """
    rows = np.ascontiguousarray(x.numpy())
    if rows.shape[1] < weight.in_features:
        rows = np.pad(rows, ((0, 0), (0, weight.in_features - rows.shape[1])))
    out = np.empty((len(rows), weight.out_features), np.float32)
    if len(rows):
        project(out, rows, weight.description, crew.board())
    return torch.from_numpy(out)


@compiled()
def project(out, x, weight, board):
    """out [rows, out_features] = x [rows, in_features] times a packed weight, by its description, with the helpers of `board`."""
    tasks = carray(pointer_to(weight[_TASKS], np.int64), (max(1, weight[_NUM_SEGMENTS]),))
    if weight[_TYPE] == _BLOCKS:
        segments = carray(pointer_to(weight[_SEGMENTS], np.int64), (weight[_NUM_SEGMENTS], _SEGMENT_FIELDS))
        words = _quantize_rows(x, segments)
        _multiply_blocks(out, words, weight[_WEIGHT], segments, tasks, board)
    elif weight[_TYPE] == _HALF:
        packed = np.empty(x.size, np.float32)
        _pack_rows(packed, x)
        _multiply_panels(out, packed, weight[_WEIGHT], weight[_PANELS], weight[_STEPS], 2, tasks[0], board)
    else:
        pairs = np.empty(len(x) * _num_pairs(x.shape[1]), np.uint32)
        _round_rows(pairs, x)
        _multiply_panels(out, pairs, weight[_WEIGHT], weight[_PANELS], weight[_STEPS], 4, tasks[0], board)
