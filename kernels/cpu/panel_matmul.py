"""Product of packed rows with panels of 16-bit weights on the CPU (`half_matmul`, `bfloat_matmul`), summed in float32.

Both go through their input columns in steps: of one column, whose float16 weights are widened as they are loaded, or of a pair of
bfloat16 columns, which are multiplied as they are.
"""

from __future__ import annotations

import functools

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from kernels.cpu.compiled import compiled
from kernels.cpu.crew import CHUNK_BYTES, OPERANDS, make_task, pointer_to, share
from kernels.cpu.ir import (
    FLOAT,
    INT32,
    LANES,
    LINE,
    at,
    int64,
    integers,
    load_as,
    load_wide,
    multiply_add,
    pointers,
    prefetch,
    splat,
    store,
    switch,
)
from kernels.cpu.pairs import add_products
from kernels.cpu.tiles import HALF_PANEL, HALF_ROWS, copy_tile, tile_rows

PANEL = HALF_PANEL
_OUT, _ROWS, _WIDTH, _X, _WEIGHTS, _STEPS = range(OPERANDS, OPERANDS + 6)  # operands of the task, on the board
_COLUMNS = range(0, PANEL, LANES)
_FLOATS, _WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, LANES)


@intrinsic
def _tile(typing_context, rows, out, place, stride, x, first, weights, panel, steps, ahead, share):
    """out[place + r * stride + c] = sum over k < steps of x[first + k * rows + r] * weights[panel, k, c], for r < rows, c < PANEL.
    `out` and `x` are flat. While step k goes by, the cache lines of `weights` from element ahead + k * share on are asked for, as
    many as a step has."""

    def generate(context, builder, signature, arguments):
        out_data, x_data, weight_data = pointers(context, builder, signature, arguments, (1, 4, 6))
        num_rows, start, stride_value, x_start = integers(context, builder, signature, arguments, (0, 2, 3, 5))
        panel_index, count, first_ahead, step_ahead = integers(context, builder, signature, arguments, (7, 8, 9, 10))
        stored = signature.args[6].dtype
        panel_data = at(builder, weight_data, builder.mul(panel_index, builder.mul(count, int64(PANEL))))
        tile_data = at(builder, x_data, x_start)

        def load(place):
            if stored == types.uint32:
                return load_as(builder, at(builder, panel_data, place), _WORDS, 4)
            return load_wide(builder, panel_data, place, LANES, stored)

        def add(total, value, weight):
            if stored == types.uint32:
                return add_products(builder, total, value, weight)
            return multiply_add(builder, value, weight, total)

        def emit(height):
            sums = {(r, c): cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, None)) for r in range(height) for c in _COLUMNS}
            with cgutils.for_range(builder, count) as loop:
                line_ahead = at(builder, weight_data, builder.add(first_ahead, builder.mul(loop.index, step_ahead)))
                for element in range(0, PANEL, LINE * 8 // stored.bitwidth):
                    prefetch(builder, at(builder, line_ahead, element))
                line = builder.mul(loop.index, int64(PANEL))
                loaded = {c: load(builder.add(line, int64(c))) for c in _COLUMNS}
                values = at(builder, tile_data, builder.mul(loop.index, int64(height)))
                for r in range(height):
                    value = splat(builder, builder.load(at(builder, values, r)), loaded[0].type)
                    for c in _COLUMNS:
                        builder.store(add(builder.load(sums[r, c]), value, loaded[c]), sums[r, c])
            for r in range(height):
                row = builder.add(start, builder.mul(stride_value, int64(r)))
                for c in _COLUMNS:
                    store(builder, out_data, builder.add(row, int64(c)), builder.load(sums[r, c]))

        switch(builder, num_rows, range(1, HALF_ROWS + 1), emit)
        return context.get_dummy_value()

    return types.none(rows, out, place, stride, x, first, weights, panel, steps, ahead, share), generate


def _make_task(dtype: type[np.generic]) -> int:
    row_dtype = np.uint32 if dtype is np.uint32 else np.float32

    def multiply(board, begin, end):
        """Panels begin..end-1 of a product; x as the weights' kernel packs rows."""
        rows, columns, steps = board[_ROWS], board[_WIDTH], board[_STEPS]
        flat = carray(pointer_to(board[_OUT], np.float32), (rows * columns,))
        x = carray(pointer_to(board[_X], row_dtype), (1,))
        weights = carray(pointer_to(board[_WEIGHTS], dtype), (1,))
        scratch = np.empty((HALF_ROWS, PANEL), np.float32)
        out, flat_scratch = flat.reshape(rows, columns), scratch.reshape(-1)
        tiles = (rows + HALF_ROWS - 1) // HALF_ROWS
        share_ahead = (PANEL + tiles - 1) // tiles  # elements of the next panel that each tile asks for, step by step
        for panel in range(begin, end):
            column = panel * PANEL
            is_whole = column + PANEL <= columns
            target, stride = (flat, columns) if is_whole else (flat_scratch, PANEL)
            ahead = min(panel + 1, end - 1) * steps * PANEL
            row = 0
            while row < rows:
                count = tile_rows(row, rows, HALF_ROWS)
                place = row * columns + column if is_whole else 0
                _tile(count, target, place, stride, x, row * steps, weights, panel, steps, ahead, share_ahead)
                if not is_whole:
                    copy_tile(out, row, column, columns, scratch, count)
                row += count
                ahead += steps * share_ahead

    return make_task(multiply)


@functools.cache
def task(dtype: str) -> int:
    """Of `crew.share`: the panels of a product with weights of this type, int16 or uint32."""
    return _make_task(np.dtype(dtype).type)


@compiled()
def multiply(out, x, weights, panels, steps, width, task, board):
    """out [rows, out_features] = packed rows times weights [panels, steps, PANEL], with the helpers that `board` has.

    x holds the rows as their kernel packs them: tile by tile, step by step, the tile's rows beside each other. weights: the address
    of int16 or uint32, of `width` bytes each.
    """
    board[_OUT], board[_ROWS], board[_WIDTH], board[_X] = out.ctypes.data, out.shape[0], out.shape[1], x.ctypes.data
    board[_WEIGHTS], board[_STEPS] = weights, steps
    share(board, task, panels, 1 + CHUNK_BYTES // (steps * PANEL * width))
