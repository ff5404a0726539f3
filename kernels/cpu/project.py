"""Product of float32 rows with packed weights of every kind: rows are packed as the weights' kernel wants them, then multiplied."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from kernels.cpu import bfloat_matmul, block_matmul, crew, half_matmul, panel_matmul
from kernels.cpu.compiled import compiled

_multiply_panels, _multiply_blocks = panel_matmul.multiply, block_matmul.multiply
_pack_rows, _round_rows, _num_pairs = half_matmul.pack_rows, bfloat_matmul.round_rows, bfloat_matmul.num_pairs
_quantize_rows = block_matmul.quantize_rows
_NO_SEGMENTS = np.zeros((0, block_matmul.SEGMENT_FIELDS), np.int64)


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out_features, in_features], packed by `pack_half`, `pack_bfloat` or, with segments, by `pack_blocks`."""

    packed: NDArray[Any]
    out_features: int
    in_features: int
    segments: NDArray[np.int64] = field(default_factory=lambda: _NO_SEGMENTS)

    @property
    def operands(self) -> tuple[NDArray[Any], NDArray[np.int64], int]:
        """What `project` takes of it."""
        task = block_matmul.task() if self.packed.dtype == np.uint8 else panel_matmul.task(self.packed.dtype.name)
        return self.packed, self.segments, task


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
        _project_rows(out, rows, *weight.operands, crew.board())
    return torch.from_numpy(out)


def project(out, x, weight, segments, task, board):
    """out [rows, out_features] = x [rows, in_features] times a packed weight, by its `operands`, with the helpers of `board`."""
    raise NotImplementedError("for compiled code only")


@overload(project)
def _project(out, x, weight, segments, task, board):
    if weight.dtype == types.int16:
        return _project_half
    if weight.dtype == types.uint32:
        return _project_bfloat
    return _project_blocks


def _project_half(out, x, weight, segments, task, board):
    packed = np.empty(x.size, np.float32)
    _pack_rows(packed, x)
    _multiply_panels(out, packed, weight, board, task)


def _project_bfloat(out, x, weight, segments, task, board):
    words = np.empty(len(x) * _num_pairs(x.shape[1]), np.uint32)
    _round_rows(words, x)
    _multiply_panels(out, words, weight, board, task)


def _project_blocks(out, x, weight, segments, task, board):
    words = _quantize_rows(x, segments)
    _multiply_blocks(out, words, weight, segments, board, task)


@compiled()
def _project_rows(out, x, weight, segments, task, board):
    project(out, x, weight, segments, task, board)
