"""Product of float32 rows with 16-bit weights on the CPU, summed in float32: weights are widened as they are loaded.

A row costs half the bytes of a float32 product, and as many multiplications.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu_ir import FLOAT, LANES, LINE, at, int64, integers, load_wide, multiply_add, pointers, prefetch, splat, store
from kernels.cpu_math import widen
from kernels.cpu_rows import HALF_PANEL, HALF_ROWS, WIDE, copy_tile, num_panels, tile_rows
from kernels.cpu_threads import for_ranges

PANEL = HALF_PANEL


def pack_half(weight: torch.Tensor) -> np.ndarray:
    """weight [out_features, in_features] float16 in panels: [panels, in_features, PANEL] int16, its bits, filled up with zeros."""
    out_features, in_features = weight.shape
    panels = num_panels(out_features, PANEL)
    padded = np.zeros((panels * PANEL, in_features), np.int16)
    padded[:out_features] = weight.contiguous().view(torch.int16).numpy()
    return np.ascontiguousarray(padded.reshape(panels, PANEL, in_features).swapaxes(1, 2))


def half_matmul(x: torch.Tensor, packed: np.ndarray, out_features: int) -> torch.Tensor:
    """x [rows, in_features] float32 times `pack_half`'s weights: [rows, out_features] float32."""
    rows = np.ascontiguousarray(x.numpy())
    out = np.empty((len(rows), out_features), np.float32)
    if len(rows):
        packed_rows = np.empty(rows.size, np.float32)
        pack_rows(packed_rows, rows)
        for_ranges(lambda begin, end: multiply(out, packed_rows, packed, begin, end), len(packed))
    return torch.from_numpy(out)


def half_rows(packed: np.ndarray, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` [n] int64 of the weight that was packed, as float32 [n, in_features]."""
    out = np.empty((len(indices), packed.shape[1]), np.float32)
    _take_rows(out, packed, indices.numpy())
    return torch.from_numpy(out)


def _make_tile(num_rows: int) -> Callable[..., Any]:
    """tile(out, place, stride, x, first, weights, panel, ahead, share, in_features): out[place + r * stride + c] = sum over k of
    x[first + k * num_rows + r] * weights[panel, k, c], for r < num_rows, c < PANEL. `out` and `x` are flat. While column k goes by,
    the two cache lines of `weights` from element ahead + k * share on are asked for."""

    @intrinsic
    def tile(typing_context, out, place, stride, x, first, weights, panel, ahead, share, in_features):
        def generate(context, builder, signature, arguments):
            out_data, x_data, weight_data = pointers(context, builder, signature, arguments, (0, 3, 5))
            start, step, x_start, panel_index, count = integers(context, builder, signature, arguments, (1, 2, 4, 6, 9))
            first_ahead, step_ahead = integers(context, builder, signature, arguments, (7, 8))
            vector = ir.VectorType(FLOAT, LANES)
            columns = range(0, PANEL, LANES)
            sums = {(r, c): cgutils.alloca_once_value(builder, ir.Constant(vector, None)) for r in range(num_rows) for c in columns}
            panel_data = at(builder, weight_data, builder.mul(panel_index, builder.mul(count, int64(PANEL))))
            tile_data = at(builder, x_data, x_start)
            with cgutils.for_range(builder, count) as loop:
                line = builder.mul(loop.index, int64(PANEL))
                place_ahead = builder.add(first_ahead, builder.mul(loop.index, step_ahead))
                for offset in (0, LINE // 2):  # of 16-bit weights
                    prefetch(builder, at(builder, weight_data, builder.add(place_ahead, int64(offset))))
                loaded = {
                    c: load_wide(builder, panel_data, builder.add(line, int64(c)), LANES, signature.args[5].dtype) for c in columns
                }
                values = at(builder, tile_data, builder.mul(loop.index, int64(num_rows)))
                for r in range(num_rows):
                    value = splat(builder, builder.load(at(builder, values, r)), vector)
                    for c in columns:
                        total = multiply_add(builder, value, loaded[c], builder.load(sums[r, c]))
                        builder.store(total, sums[r, c])
            for r in range(num_rows):
                row = builder.add(start, builder.mul(step, int64(r)))
                for c in columns:
                    store(builder, out_data, builder.add(row, int64(c)), builder.load(sums[r, c]))
            return context.get_dummy_value()

        return types.none(out, place, stride, x, first, weights, panel, ahead, share, in_features), generate

    return tile


_tile1, _tile2, _tile3, _tile4, _tile5, _tile6, _tile7, _tile8 = (_make_tile(rows) for rows in range(1, 9))


@numba.njit(cache=True, nogil=True, inline="always")
def _tile(rows, out, place, stride, x, first, weights, panel, ahead, share):
    in_features = weights.shape[1]
    if WIDE and rows == 8:
        _tile8(out, place, stride, x, first, weights, panel, ahead, share, in_features)
    elif WIDE and rows == 7:
        _tile7(out, place, stride, x, first, weights, panel, ahead, share, in_features)
    elif rows == 6:
        _tile6(out, place, stride, x, first, weights, panel, ahead, share, in_features)
    elif rows == 5:
        _tile5(out, place, stride, x, first, weights, panel, ahead, share, in_features)
    elif rows == 4:
        _tile4(out, place, stride, x, first, weights, panel, ahead, share, in_features)
    elif rows == 3:
        _tile3(out, place, stride, x, first, weights, panel, ahead, share, in_features)
    elif rows == 2:
        _tile2(out, place, stride, x, first, weights, panel, ahead, share, in_features)
    else:
        _tile1(out, place, stride, x, first, weights, panel, ahead, share, in_features)


@numba.njit(cache=True, nogil=True)
def multiply(out, x, weights, begin, end):
    """Panels begin..end-1 of the product; x is packed by `pack_rows`."""
    rows, columns = out.shape
    in_features = weights.shape[1]
    flat = out.reshape(-1)
    scratch = np.empty((HALF_ROWS, PANEL), np.float32)
    flat_scratch = scratch.reshape(-1)
    share = PANEL // ((rows + HALF_ROWS - 1) // HALF_ROWS)  # columns of the next panel that each tile asks for
    for panel in range(begin, end):
        column = panel * PANEL
        ahead = min(panel + 1, end - 1) * in_features * PANEL
        row = 0
        while row < rows:
            count = tile_rows(row, rows, HALF_ROWS)
            if column + PANEL <= columns:
                _tile(count, flat, row * columns + column, columns, x, row * in_features, weights, panel, ahead, share)
            else:
                _tile(count, flat_scratch, 0, PANEL, x, row * in_features, weights, panel, ahead, share)
                copy_tile(out, row, column, scratch, count)
            row += count
            ahead += in_features * share


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
def _take_rows(out, packed, indices):
    for i in range(len(indices)):
        panel, column = indices[i] // PANEL, indices[i] % PANEL
        for k in range(packed.shape[1]):
            out[i, k] = widen(packed[panel, k, column])
