"""Product of float32 rows with quantized weights as they are, on the CPU: codes of 4 or 8 bits in blocks of a scale and a minimum.

A row's activations are rounded to 8 bits in the same blocks, each with a scale of its own, so that an outlier costs its block alone
its precision. Products of a block are summed in integers, exactly, blocks in float32 in a fixed order: the same bits on every
processor, whatever instruction multiplies bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from kernels.blocks import Blocks
from kernels.cpu_dot import BYTES, WORDS, dot_bytes
from kernels.cpu_ir import (
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
)
from kernels.cpu_math import widen
from kernels.cpu_rows import BLOCK_PANEL, BLOCK_ROWS, WIDE, copy_tile, num_panels, tile_rows
from kernels.cpu_threads import for_ranges

PANEL = BLOCK_PANEL
VECTORS = PANEL // LANES  # of a panel
GROUP = 4  # input columns that one instruction multiplies and sums


@dataclass
class PackedBlocks:
    """`Blocks` as the product reads them. Codes of 4 bits lie two in a byte: the block's first half low, its second high."""

    codes: NDArray[np.uint8]  # [panels, blocks, VECTORS, bytes of LANES columns of a block]
    scales: NDArray[Any]  # [panels, blocks, 2, PANEL]: scales, minima; float32, or int16, the bits of float16 where that is exact
    bits: int
    block_size: int

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * self.block_size


def pack_blocks(blocks: Blocks) -> PackedBlocks:
    rows, columns = blocks.codes.shape
    panels, size = num_panels(rows, PANEL), blocks.block_size
    count = columns // size
    codes = _pad_rows(blocks.codes, panels).reshape(panels, VECTORS, LANES, count, size // GROUP, GROUP).transpose(0, 3, 1, 4, 2, 5)
    if blocks.bits == 4:
        half = size // GROUP // 2
        codes = codes[:, :, :, :half] | codes[:, :, :, half:] << 4
    scales = np.stack(
        [_pad_rows(x, panels).reshape(panels, PANEL, count).swapaxes(1, 2) for x in (blocks.scales, blocks.minima)], 2
    )
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    exact = np.array_equal(halves.astype(np.float32), scales)
    return PackedBlocks(
        np.ascontiguousarray(codes).reshape(panels, count, VECTORS, -1),
        np.ascontiguousarray(halves).view(np.int16) if exact else np.ascontiguousarray(scales),
        blocks.bits,
        size,
    )


def _pad_rows(x: NDArray[Any], panels: int) -> NDArray[Any]:
    missing = panels * PANEL - len(x)
    return np.pad(x, ((0, missing), (0, 0))) if missing else x


def block_matmul(x: torch.Tensor, packed: PackedBlocks, out_features: int) -> torch.Tensor:
    """x [rows, in_features] float32 times `pack_blocks`'s weights: [rows, out_features] float32.

    x may have fewer columns than the blocks, whose last is then padded with zeros. NaN or infinity in a row makes the row's whole
    product NaN.
    """
    rows, in_features = np.ascontiguousarray(x.numpy()), packed.in_features
    if rows.shape[1] < in_features:
        rows = np.pad(rows, ((0, 0), (0, in_features - rows.shape[1])))
    out = np.empty((len(rows), out_features), np.float32)
    if len(rows):
        codes = np.empty(rows.size // GROUP, np.int32)
        sums = np.empty(2 * rows.size // packed.block_size, np.float32)
        quantize_rows(codes, sums, rows, packed.block_size)
        size, bits = packed.block_size, packed.bits
        for_ranges(
            lambda begin, end: multiply(out, codes, sums, packed.codes, packed.scales, bits, size, begin, end), len(packed.codes)
        )
    return torch.from_numpy(out)


def block_rows(packed: PackedBlocks, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` [n] int64 of the weight that was packed, as float32 [n, in_features]."""
    out = np.empty((len(indices), packed.in_features), np.float32)
    _take_rows(out, packed.codes, packed.scales, indices.numpy(), packed.bits, packed.block_size)
    return torch.from_numpy(out)


def _make_tile(num_rows: int) -> Callable[..., Any]:
    """tile(out, place, stride, x, sums, row, codes, scales, panel, num_blocks, ahead, lines, bits, block_size): a panel's product
    of the `num_rows` rows that begin at `row`, which `quantize_rows` packed, goes to out[place + r * stride + c]. `out`, `x`,
    `sums` are flat; `bits` and `block_size` are constants. While block b goes by, `lines` cache lines of `codes` from
    ahead + b * lines on are asked for."""

    @intrinsic(prefer_literal=True)
    def tile(typing_context, out, place, stride, x, sums, row, codes, scales, panel, num_blocks, ahead, lines, bits, block_size):
        def generate(context, builder, signature, arguments):
            out_data, x_data, sum_data, code_data, scale_data = pointers(context, builder, signature, arguments, (0, 3, 4, 6, 7))
            start, step, first, panel_index, count = integers(context, builder, signature, arguments, (1, 2, 5, 8, 9))
            next_line, num_lines = integers(context, builder, signature, arguments, (10, 11))
            kind = _BlockKind(bits.literal_value, block_size.literal_value)
            floats = ir.VectorType(FLOAT, LANES)
            totals = [
                [cgutils.alloca_once_value(builder, ir.Constant(floats, None)) for _ in range(VECTORS)] for _ in range(num_rows)
            ]
            x_tile = at(builder, x_data, builder.mul(builder.mul(first, count), int64(kind.groups)))
            sum_tile = at(builder, sum_data, builder.mul(builder.mul(first, count), int64(2)))
            before_panel = builder.mul(panel_index, count)
            with cgutils.for_range(builder, count) as loop:
                block = builder.add(before_panel, loop.index)
                block_codes = at(builder, code_data, builder.mul(block, int64(kind.num_bytes)))
                block_scales = at(builder, scale_data, builder.mul(block, int64(2 * PANEL)))
                block_x = at(builder, x_tile, builder.mul(loop.index, int64(kind.groups * num_rows)))
                block_sums = at(builder, sum_tile, builder.mul(loop.index, int64(2 * num_rows)))
                first_line = builder.add(next_line, builder.mul(loop.index, num_lines))
                with cgutils.for_range(builder, num_lines) as ahead_loop:
                    line = builder.mul(builder.add(first_line, ahead_loop.index), int64(LINE))
                    prefetch(builder, at(builder, code_data, line))
                products = [[ir.Constant(WORDS, None) for _ in range(VECTORS)] for _ in range(num_rows)]
                for group, codes_of_group in kind.load(builder, block_codes):
                    for r in range(num_rows):
                        word = load_as(builder, at(builder, block_x, group * num_rows + r), INT32, 4)
                        signed = splat(builder, word, WORDS)
                        for vector in range(VECTORS):
                            products[r][vector] = dot_bytes(builder, products[r][vector], codes_of_group[vector], signed, kind.bits)
                stored = signature.args[7].dtype
                scale, minimum = (
                    [
                        load_wide(builder, block_scales, int64(part * PANEL + vector * LANES), LANES, stored)
                        for vector in range(VECTORS)
                    ]
                    for part in (0, 1)
                )
                for r in range(num_rows):
                    x_scale, x_sum = (
                        splat(builder, builder.load(at(builder, block_sums, part * num_rows + r)), floats) for part in (0, 1)
                    )
                    for vector in range(VECTORS):
                        exact = builder.sitofp(products[r][vector], floats)
                        total = multiply_add(builder, minimum[vector], x_sum, builder.load(totals[r][vector]))
                        total = multiply_add(builder, exact, builder.fmul(scale[vector], x_scale), total)
                        builder.store(total, totals[r][vector])
            for r in range(num_rows):
                line = builder.add(start, builder.mul(step, int64(r)))
                for vector in range(VECTORS):
                    store(builder, out_data, builder.add(line, int64(vector * LANES)), builder.load(totals[r][vector]))
            return context.get_dummy_value()

        return types.none(
            out, place, stride, x, sums, row, codes, scales, panel, num_blocks, ahead, lines, bits, block_size
        ), generate

    return tile


@dataclass(frozen=True)
class _BlockKind:
    """How the codes of a panel's block lie in memory, vector of columns by vector of columns."""

    bits: int
    block_size: int

    @property
    def groups(self) -> int:
        return self.block_size // GROUP

    @property
    def chunks(self) -> int:
        """Loads that bring the codes of LANES columns."""
        return self.groups * self.bits // 8

    @property
    def num_bytes(self) -> int:
        return VECTORS * self.chunks * BYTES.count

    def load(self, builder, block):
        """Yields (group, its codes as bytes, a vector of LANES columns each)."""
        for chunk in range(self.chunks):
            raw = [
                load_as(builder, at(builder, block, (vector * self.chunks + chunk) * BYTES.count), BYTES, 1)
                for vector in range(VECTORS)
            ]
            if self.bits == 8:
                yield chunk, raw
                continue
            low, shift = ir.Constant(BYTES, [15] * BYTES.count), ir.Constant(WORDS, [4] * LANES)
            yield chunk, [builder.and_(each, low) for each in raw]
            high = [builder.bitcast(builder.lshr(builder.bitcast(each, WORDS), shift), BYTES) for each in raw]
            yield chunk + self.chunks, [builder.and_(each, low) for each in high]


_tile1, _tile2, _tile3, _tile4, _tile5, _tile6, _tile7, _tile8 = (_make_tile(rows) for rows in range(1, 9))


@numba.njit(cache=True, nogil=True)
def _tile(rows, out, place, stride, x, sums, row, codes, scales, panel, ahead, lines, bits, block_size):
    blocks = codes.shape[1]
    if bits == 4:
        if WIDE and rows == 8:
            _tile8(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 4, 32)
        elif WIDE and rows == 7:
            _tile7(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 4, 32)
        elif WIDE and rows == 6:
            _tile6(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 4, 32)
        elif WIDE and rows == 5:
            _tile5(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 4, 32)
        elif WIDE and rows == 4:
            _tile4(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 4, 32)
        elif rows == 3:
            _tile3(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 4, 32)
        elif rows == 2:
            _tile2(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 4, 32)
        else:
            _tile1(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 4, 32)
    elif block_size == 32:
        if WIDE and rows == 8:
            _tile8(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 8, 32)
        elif WIDE and rows == 7:
            _tile7(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 8, 32)
        elif WIDE and rows == 6:
            _tile6(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 8, 32)
        elif WIDE and rows == 5:
            _tile5(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 8, 32)
        elif WIDE and rows == 4:
            _tile4(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 8, 32)
        elif rows == 3:
            _tile3(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 8, 32)
        elif rows == 2:
            _tile2(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 8, 32)
        else:
            _tile1(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 8, 32)
    else:
        if WIDE and rows == 8:
            _tile8(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 8, 16)
        elif WIDE and rows == 7:
            _tile7(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 8, 16)
        elif WIDE and rows == 6:
            _tile6(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 8, 16)
        elif WIDE and rows == 5:
            _tile5(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 8, 16)
        elif WIDE and rows == 4:
            _tile4(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 8, 16)
        elif rows == 3:
            _tile3(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 8, 16)
        elif rows == 2:
            _tile2(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 8, 16)
        else:
            _tile1(out, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines, 8, 16)


@numba.njit(cache=True, nogil=True)
def multiply(out, x, sums, codes, scales, bits, block_size, begin, end):
    """Panels begin..end-1 of the product; x and sums as `quantize_rows` packs them."""
    rows, columns = out.shape
    flat = out.reshape(-1)
    scratch = np.empty((BLOCK_ROWS, PANEL), np.float32)
    flat_scratch = scratch.reshape(-1)
    # cache lines of the next panel's codes that each tile asks for in a block; one tile alone leaves that to the processor
    block_lines, tiles = codes.shape[2] * codes.shape[3] // LINE, (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    lines = (block_lines + tiles - 1) // tiles if tiles > 1 else 0
    panel_lines = codes.shape[1] * block_lines
    for panel in range(begin, end):
        column = panel * PANEL
        ahead = min(panel + 1, end - 1) * panel_lines
        last_line = ahead + panel_lines
        row = 0
        while row < rows:
            count = tile_rows(row, rows, BLOCK_ROWS)
            if column + PANEL <= columns:
                _tile(
                    count, flat, row * columns + column, columns, x, sums, row, codes, scales, panel, ahead, lines, bits, block_size
                )
            else:
                _tile(count, flat_scratch, 0, PANEL, x, sums, row, codes, scales, panel, ahead, lines, bits, block_size)
                copy_tile(out, row, column, scratch, count)
            row += count
            ahead = min(ahead + codes.shape[1] * lines, last_line - codes.shape[1] * lines)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def quantize_rows(packed, sums, x, block_size):
    """x [rows, columns] rounded to -127..127 by blocks. Tile by tile: packed, words of four codes, [blocks, groups, rows]; sums,
    [blocks, 2, rows]: the block's scale, and the sum of what its codes stand for."""
    rows, columns = x.shape
    blocks, groups = columns // block_size, block_size // GROUP
    codes = np.empty(columns, np.int8)
    words = codes.view(np.int32)
    row = 0
    while row < rows:
        count = tile_rows(row, rows, BLOCK_ROWS)
        first_word, first_sum = row * blocks * groups, row * blocks * 2
        for r in range(count):
            for b in range(blocks):
                block = x[row + r, b * block_size : (b + 1) * block_size]
                out = codes[b * block_size : (b + 1) * block_size]
                highest = np.int32(0)
                for i in range(block_size):  # as integers, magnitudes are ordered like floats, NaN above all
                    highest = max(highest, np.int32(np.float32(block[i]).view(np.int32) & np.int32(0x7FFFFFFF)))
                magnitude = np.int32(highest).view(np.float32)
                scale = magnitude / np.float32(127.0)
                inverse = np.float32(127.0) / magnitude if magnitude > np.float32(1e-30) else np.float32(0.0)
                if highest >= np.int32(0x7F800000):
                    scale, inverse = np.float32(np.nan), np.float32(0.0)
                total = np.int32(0)
                for i in range(block_size):
                    code = np.int32(np.rint(block[i] * inverse)) if inverse > np.float32(0.0) else np.int32(0)
                    out[i] = np.int8(code)
                    total += code
                place = first_sum + 2 * b * count + r
                sums[place] = scale
                sums[place + count] = scale * np.float32(total)
            for g in range(blocks * groups):
                packed[first_word + g * count + r] = words[g]
        row += count


@numba.njit(cache=True, nogil=True)
def _take_rows(out, codes, scales, indices, bits, block_size):
    groups = block_size // GROUP
    chunks = groups // 2 if bits == 4 else groups
    for i in range(len(indices)):
        panel, column = indices[i] // PANEL, indices[i] % PANEL
        vector, lane = column // LANES, column % LANES
        for b in range(codes.shape[1]):
            scale, minimum = widen(scales[panel, b, 0, column]), widen(scales[panel, b, 1, column])
            for k in range(block_size):
                group = k // GROUP
                code = codes[panel, b, vector, ((group % chunks) * LANES + lane) * GROUP + k % GROUP]
                if bits == 4:
                    code = (code >> np.uint8(4 * (group // chunks))) & np.uint8(15)
                out[i, b * block_size + k] = np.float32(code) * scale + minimum
