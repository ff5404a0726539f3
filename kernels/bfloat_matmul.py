"""Product of rows with bfloat16 weights on the CPU: rows are rounded to bfloat16 too, products summed pair by pair in float32.

Where the processor multiplies pairs of bfloat16, a row costs half the multiplications of `half_matmul`; elsewhere as many.
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

from kernels.cpu_ir import FLOAT, INT32, LANES, LINE, at, int64, integers, load_as, pointers, prefetch, splat, store
from kernels.cpu_math import narrow, widen
from kernels.cpu_pairs import PAIR, add_products
from kernels.cpu_rows import HALF_PANEL, HALF_ROWS, WIDE, copy_tile, num_panels, tile_rows
from kernels.cpu_threads import for_ranges

PANEL = HALF_PANEL
_WORDS, _FLOATS = ir.VectorType(INT32, LANES), ir.VectorType(FLOAT, LANES)
_WORDS_OF_LINE = LINE // 4


def pack_bfloat(weight: torch.Tensor) -> np.ndarray:
    """weight [out_features, in_features] bfloat16 in panels: [panels, pairs, PANEL] uint32, filled up with zeros."""
    out_features, in_features = weight.shape
    panels, pairs = num_panels(out_features, PANEL), num_pairs(in_features)
    padded = np.zeros((panels * PANEL, pairs * PAIR), np.uint16)
    padded[:out_features, :in_features] = weight.contiguous().view(torch.int16).numpy().view(np.uint16)
    return np.ascontiguousarray(padded.view(np.uint32).reshape(panels, PANEL, pairs).swapaxes(1, 2))


@numba.njit(cache=True, nogil=True)
def num_pairs(columns):
    return (columns + PAIR - 1) // PAIR


def bfloat_matmul(x: torch.Tensor, packed: np.ndarray, out_features: int) -> torch.Tensor:
    """x [rows, in_features] float32 times `pack_bfloat`'s weights: [rows, out_features] float32."""
    rows = np.ascontiguousarray(x.numpy())
    out = np.empty((len(rows), out_features), np.float32)
    if len(rows):
        words = np.empty(len(rows) * packed.shape[1], np.uint32)
        round_rows(words, rows)
        for_ranges(lambda begin, end: multiply(out, words, packed, begin, end), len(packed))
    return torch.from_numpy(out)


def bfloat_rows(packed: np.ndarray, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` [n] int64 of the weight that was packed, as float32 [n, pairs * PAIR]."""
    out = np.empty((len(indices), packed.shape[1] * PAIR), np.float32)
    _take_rows(out, packed, indices.numpy())
    return torch.from_numpy(out)


def _make_tile(num_rows: int) -> Callable[..., Any]:
    """tile(out, place, stride, x, first, weights, panel, ahead, share, pairs): out[place + r * stride + c] = the product of row r
    of the tile whose words begin at x[first], [pairs, num_rows], with column c of the panel; r < num_rows, c < PANEL. `out` and `x`
    are flat. While pair k goes by, `share` words of `weights` from ahead + k * share on are asked for, by cache lines."""

    @intrinsic
    def tile(typing_context, out, place, stride, x, first, weights, panel, ahead, share, pairs):
        def generate(context, builder, signature, arguments):
            out_data, x_data, weight_data = pointers(context, builder, signature, arguments, (0, 3, 5))
            start, step, x_start, panel_index, count = integers(context, builder, signature, arguments, (1, 2, 4, 6, 9))
            first_ahead, step_ahead = integers(context, builder, signature, arguments, (7, 8))
            columns = range(0, PANEL, LANES)
            sums = {
                (r, c): cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, None)) for r in range(num_rows) for c in columns
            }
            panel_data = at(builder, weight_data, builder.mul(panel_index, builder.mul(count, int64(PANEL))))
            tile_data = at(builder, x_data, x_start)
            with cgutils.for_range(builder, count) as loop:
                line = builder.mul(loop.index, int64(PANEL))
                place_ahead = builder.add(first_ahead, builder.mul(loop.index, step_ahead))
                for offset in range(0, PANEL, _WORDS_OF_LINE):
                    prefetch(builder, at(builder, weight_data, builder.add(place_ahead, int64(offset))))
                loaded = {c: load_as(builder, at(builder, panel_data, builder.add(line, int64(c))), _WORDS, 4) for c in columns}
                words = at(builder, tile_data, builder.mul(loop.index, int64(num_rows)))
                for r in range(num_rows):
                    word = splat(builder, builder.load(at(builder, words, r)), _WORDS)
                    for c in columns:
                        builder.store(add_products(builder, builder.load(sums[r, c]), word, loaded[c]), sums[r, c])
            for r in range(num_rows):
                row = builder.add(start, builder.mul(step, int64(r)))
                for c in columns:
                    store(builder, out_data, builder.add(row, int64(c)), builder.load(sums[r, c]))
            return context.get_dummy_value()

        return types.none(out, place, stride, x, first, weights, panel, ahead, share, pairs), generate

    return tile


_tile1, _tile2, _tile3, _tile4, _tile5, _tile6, _tile7, _tile8 = (_make_tile(rows) for rows in range(1, 9))


@numba.njit(cache=True, nogil=True, inline="always")
def _tile(rows, out, place, stride, x, first, weights, panel, ahead, share):
    pairs = weights.shape[1]
    if WIDE and rows == 8:
        _tile8(out, place, stride, x, first, weights, panel, ahead, share, pairs)
    elif WIDE and rows == 7:
        _tile7(out, place, stride, x, first, weights, panel, ahead, share, pairs)
    elif rows == 6:
        _tile6(out, place, stride, x, first, weights, panel, ahead, share, pairs)
    elif rows == 5:
        _tile5(out, place, stride, x, first, weights, panel, ahead, share, pairs)
    elif rows == 4:
        _tile4(out, place, stride, x, first, weights, panel, ahead, share, pairs)
    elif rows == 3:
        _tile3(out, place, stride, x, first, weights, panel, ahead, share, pairs)
    elif rows == 2:
        _tile2(out, place, stride, x, first, weights, panel, ahead, share, pairs)
    else:
        _tile1(out, place, stride, x, first, weights, panel, ahead, share, pairs)


@numba.njit(cache=True, nogil=True)
def multiply(out, x, weights, begin, end):
    """Panels begin..end-1 of the product; x is packed by `round_rows`."""
    rows, columns = out.shape
    pairs = weights.shape[1]
    flat = out.reshape(-1)
    scratch = np.empty((HALF_ROWS, PANEL), np.float32)
    flat_scratch = scratch.reshape(-1)
    share = PANEL // ((rows + HALF_ROWS - 1) // HALF_ROWS)  # words of the next panel that each tile asks for, pair by pair
    for panel in range(begin, end):
        column = panel * PANEL
        ahead = min(panel + 1, end - 1) * pairs * PANEL
        row = 0
        while row < rows:
            count = tile_rows(row, rows, HALF_ROWS)
            if column + PANEL <= columns:
                _tile(count, flat, row * columns + column, columns, x, row * pairs, weights, panel, ahead, share)
            else:
                _tile(count, flat_scratch, 0, PANEL, x, row * pairs, weights, panel, ahead, share)
                copy_tile(out, row, column, scratch, count)
            row += count
            ahead += pairs * share


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
def _take_rows(out, packed, indices):
    for i in range(len(indices)):
        panel, column = indices[i] // PANEL, indices[i] % PANEL
        for k in range(packed.shape[1]):
            word = packed[panel, k, column]
            out[i, PAIR * k] = widen(np.uint16(word & np.uint32(0xFFFF)))
            out[i, PAIR * k + 1] = widen(np.uint16(word >> np.uint32(16)))
