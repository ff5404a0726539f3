"""Product of float32 rows with quantized weights as they are, on the CPU: codes of 4 or 8 bits in blocks that share a scale.

Blocks have a minimum each, too, unless their codes stand for numbers around zero. A row's activations are rounded to 8 bits in the
same blocks, each with a scale of its own, so that an outlier costs its block alone its precision. Products of a block are summed in
integers, exactly, blocks in float32 in a fixed order: the same bits on every processor, whatever instruction multiplies bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from kernels.cpu.compiled import compiled
from kernels.cpu.dot import BYTES, WORDS, dot_bytes
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
from kernels.cpu.math import widen
from kernels.cpu.quantized_blocks import INT8_BLOCK, Blocks
from kernels.cpu.threads import for_ranges
from kernels.cpu.tiles import BLOCK_PANEL, BLOCK_ROWS, copy_tile, num_panels, tile_rows

PANEL = BLOCK_PANEL
GROUP = 4  # input columns that one instruction multiplies and sums
_FLOATS = ir.VectorType(FLOAT, LANES)


@dataclass(frozen=True)
class Kind:
    """How the codes of a panel's block lie in memory, and what stands beside them."""

    bits: int
    block_size: int
    is_symmetric: bool = False  # around the middle of the codes' range: no minima are kept, sums begin at what the middle adds

    @property
    def middle(self) -> int:
        """The code that stands for zero where no minima are kept."""
        return 1 << (self.bits - 1) if self.is_symmetric else 0

    @property
    def groups(self) -> int:
        return self.block_size // GROUP

    @property
    def chunks(self) -> int:
        """Loads that bring the codes of LANES columns."""
        return self.groups * self.bits // 8

    @property
    def num_bytes(self) -> int:
        return self.chunks * BYTES.count

    @property
    def parts(self) -> int:
        """Numbers of a column beside its codes: a scale, and a minimum."""
        return 1 if self.is_symmetric else 2

    def load(self, builder: ir.IRBuilder, block: ir.Value) -> Iterator[tuple[int, ir.Value]]:
        """Yields (group, the codes of the panel's columns as bytes)."""
        for chunk in range(self.chunks):
            raw = load_as(builder, at(builder, block, chunk * BYTES.count), BYTES, 1)
            if self.bits == 8:
                yield chunk, raw
                continue
            low, shift = ir.Constant(BYTES, [15] * BYTES.count), ir.Constant(WORDS, [4] * LANES)
            yield chunk, builder.and_(raw, low)
            high = builder.lshr(builder.bitcast(raw, WORDS), shift)
            yield chunk + self.chunks, builder.and_(builder.bitcast(high, BYTES), low)


KINDS = (Kind(4, 32), Kind(8, 32), Kind(8, 16), Kind(8, INT8_BLOCK, is_symmetric=True))
_BITS, _BLOCK_SIZES = tuple(kind.bits for kind in KINDS), tuple(kind.block_size for kind in KINDS)
_MIDDLES = tuple(kind.middle for kind in KINDS)


@dataclass
class PackedBlocks:
    """`Blocks` as the product reads them. Codes of 4 bits lie two in a byte: the block's first half low, its second high."""

    codes: NDArray[np.uint8]  # [panels, blocks, bytes of a panel's block]
    scales: NDArray[Any]  # [panels, blocks, parts, PANEL] float32, or the bits of float16 as int16 where they are exact
    kind: int  # index in KINDS

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * KINDS[self.kind].block_size


def pack_blocks(blocks: Blocks) -> PackedBlocks:
    """Raises ValueError where there is no kernel for such blocks."""
    rows, columns = blocks.codes.shape
    number = _find_kind(blocks)
    panels, size, parts = num_panels(rows, PANEL), KINDS[number].block_size, KINDS[number].parts
    count = columns // size
    codes = _pad_rows(blocks.codes, panels).reshape(panels, PANEL, count, size // GROUP, GROUP).transpose(0, 2, 3, 1, 4)
    if blocks.bits == 4:
        half = size // GROUP // 2
        codes = codes[:, :, :half] | codes[:, :, half:] << 4
    beside = (blocks.scales, blocks.minima)[:parts]
    scales = np.stack([_pad_rows(x, panels).reshape(panels, PANEL, count).swapaxes(1, 2) for x in beside], 2)
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    exact = np.array_equal(halves.astype(np.float32), scales)
    return PackedBlocks(
        np.ascontiguousarray(codes).reshape(panels, count, -1),
        np.ascontiguousarray(halves).view(np.int16) if exact else np.ascontiguousarray(scales),
        number,
    )


def _find_kind(blocks: Blocks) -> int:
    for number, kind in enumerate(KINDS):
        fits = not kind.is_symmetric or np.array_equal(blocks.minima, -kind.middle * blocks.scales)
        if (kind.bits, kind.block_size) == (blocks.bits, blocks.block_size) and fits:
            return number
    raise ValueError(f"there is no product with blocks of {blocks.block_size} columns, {blocks.bits} bits and such minima")


def _pad_rows(x: NDArray[Any], panels: int) -> NDArray[Any]:
    missing = panels * PANEL - len(x)
    return np.pad(x, ((0, missing), (0, 0))) if missing else x


def block_matmul(x: torch.Tensor, packed: PackedBlocks, out_features: int) -> torch.Tensor:
    """x [rows, in_features] float32 times `pack_blocks`'s weights: [rows, out_features] float32.

    x may have fewer columns than the blocks, whose last is then padded with zeros. NaN or infinity in a row makes the row's whole
    product NaN.
    """
    rows, in_features, kind = np.ascontiguousarray(x.numpy()), packed.in_features, packed.kind
    if rows.shape[1] < in_features:
        rows = np.pad(rows, ((0, 0), (0, in_features - rows.shape[1])))
    out = np.empty((len(rows), out_features), np.float32)
    if len(rows):
        codes, sums = quantize_rows(rows, kind)
        for_ranges(lambda begin, end: multiply(out, codes, sums, packed.codes, packed.scales, kind, begin, end), len(packed.codes))
    return torch.from_numpy(out)


def block_rows(packed: PackedBlocks, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` [n] int64 of the weight that was packed, as float32 [n, in_features]."""
    out = np.empty((len(indices), packed.in_features), np.float32)
    _take_rows(out, packed.codes, packed.scales, indices.numpy(), packed.kind)
    return torch.from_numpy(out)


@intrinsic
def _tile(typing_context, kind, rows, out, place, stride, x, sums, row, codes, scales, panel, num_blocks, ahead, lines):
    """A panel's product of the `rows` rows that begin at `row`, which `quantize_rows` packed, goes to out[place + r * stride + c].
    `out`, `x`, `sums` are flat; `kind` is that of one of KINDS. While block b goes by, `lines` cache lines of `codes` from
    ahead + b * lines on are asked for."""

    def generate(context, builder, signature, arguments):
        out_data, x_data, sum_data, code_data, scale_data = pointers(context, builder, signature, arguments, (2, 5, 6, 8, 9))
        number, num_rows, start, stride_value, first = integers(context, builder, signature, arguments, (0, 1, 3, 4, 7))
        panel_index, count, next_line, num_lines = integers(context, builder, signature, arguments, (10, 11, 12, 13))
        stored = signature.args[9].dtype

        def emit(kind, height):
            totals = [cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, None)) for _ in range(height)]
            x_tile = at(builder, x_data, builder.mul(builder.mul(first, count), int64(kind.groups)))
            sum_tile = at(builder, sum_data, builder.mul(builder.mul(first, count), int64(2)))
            before_panel = builder.mul(panel_index, count)
            with cgutils.for_range(builder, count) as loop:
                block = builder.add(before_panel, loop.index)
                block_codes = at(builder, code_data, builder.mul(block, int64(kind.num_bytes)))
                block_scales = at(builder, scale_data, builder.mul(block, int64(kind.parts * PANEL)))
                block_x = at(builder, x_tile, builder.mul(loop.index, int64(kind.groups * height)))
                scale_of = at(builder, sum_tile, builder.mul(loop.index, int64(2 * height)))
                sum_of = at(builder, scale_of, height)
                first_line = builder.add(next_line, builder.mul(loop.index, num_lines))
                with cgutils.for_range(builder, num_lines) as ahead_loop:
                    line = builder.mul(builder.add(first_line, ahead_loop.index), int64(LINE))
                    prefetch(builder, at(builder, code_data, line))
                products = [ir.Constant(WORDS, None)] * height
                if kind.is_symmetric:
                    products = [splat(builder, load_as(builder, at(builder, sum_of, r), INT32, 4), WORDS) for r in range(height)]
                for group, columns in kind.load(builder, block_codes):
                    for r in range(height):
                        signed = splat(builder, load_as(builder, at(builder, block_x, group * height + r), INT32, 4), WORDS)
                        products[r] = dot_bytes(builder, products[r], columns, signed, kind.bits)
                scale, *minimum = (
                    load_wide(builder, block_scales, int64(part * PANEL), LANES, stored) for part in range(kind.parts)
                )
                for r in range(height):
                    x_scale = splat(builder, builder.load(at(builder, scale_of, r)), _FLOATS)
                    total = builder.load(totals[r])
                    for each in minimum:
                        total = multiply_add(builder, each, splat(builder, builder.load(at(builder, sum_of, r)), _FLOATS), total)
                    exact = builder.sitofp(products[r], _FLOATS)
                    builder.store(multiply_add(builder, exact, builder.fmul(scale, x_scale), total), totals[r])
            for r in range(height):
                store(builder, out_data, builder.add(start, builder.mul(stride_value, int64(r))), builder.load(totals[r]))

        def emit_kind(case):
            switch(builder, num_rows, range(1, BLOCK_ROWS + 1), functools.partial(emit, KINDS[case]))

        switch(builder, number, range(len(KINDS)), emit_kind)
        return context.get_dummy_value()

    return types.none(kind, rows, out, place, stride, x, sums, row, codes, scales, panel, num_blocks, ahead, lines), generate


@compiled()
def multiply(out, x, sums, codes, scales, kind, begin, end):
    """Panels begin..end-1 of the product; x and sums as `quantize_rows` packs them."""
    rows, columns = out.shape
    flat = out.reshape(-1)
    scratch = np.empty((BLOCK_ROWS, PANEL), np.float32)
    flat_scratch = scratch.reshape(-1)
    # cache lines of the next panel's codes that each tile asks for in a block; one tile alone leaves that to the processor
    blocks, block_lines, tiles = codes.shape[1], codes.shape[2] // LINE, (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    lines = (block_lines + tiles - 1) // tiles if tiles > 1 else 0
    panel_lines = blocks * block_lines
    for panel in range(begin, end):
        column = panel * PANEL
        is_whole = column + PANEL <= columns
        target, stride = (flat, columns) if is_whole else (flat_scratch, PANEL)
        ahead = min(panel + 1, end - 1) * panel_lines
        last_line = ahead + panel_lines
        row = 0
        while row < rows:
            count = tile_rows(row, rows, BLOCK_ROWS)
            place = row * columns + column if is_whole else 0
            _tile(kind, count, target, place, stride, x, sums, row, codes, scales, panel, blocks, ahead, lines)
            if not is_whole:
                copy_tile(out, row, column, scratch, count)
            row += count
            ahead = min(ahead + blocks * lines, last_line - blocks * lines)


@compiled()
def quantize_rows(x, kind):
    """x [rows, columns] rounded to -127..127 by blocks. Returns, tile by tile and flat, words of four codes [blocks, groups, rows]
    and float32 [blocks, 2, rows]: a block's scale, and the sum of what its codes stand for; where minima are not kept, the bits of
    an integer instead, at which the sum of a product begins."""
    rows, columns = x.shape
    block_size, middle = _BLOCK_SIZES[kind], _MIDDLES[kind]
    blocks, groups = columns // block_size, block_size // GROUP
    packed, sums = np.empty(x.size // GROUP, np.int32), np.empty(2 * rows * blocks, np.float32)
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
                sums[place + count] = np.int32(-middle * total).view(np.float32) if middle else scale * np.float32(total)
            for g in range(blocks * groups):
                packed[first_word + g * count + r] = words[g]
        row += count
    return packed, sums


@compiled()
def _take_rows(out, codes, scales, indices, kind):
    bits, block_size, middle = _BITS[kind], _BLOCK_SIZES[kind], np.float32(_MIDDLES[kind])
    groups = block_size // GROUP
    chunks = groups // 2 if bits == 4 else groups
    for i in range(len(indices)):
        panel, column = indices[i] // PANEL, indices[i] % PANEL
        for b in range(codes.shape[1]):
            scale = widen(scales[panel, b, 0, column])
            minimum = -middle * scale if middle else widen(scales[panel, b, 1, column])
            for k in range(block_size):
                group = k // GROUP
                code = codes[panel, b, ((group % chunks) * LANES + column) * GROUP + k % GROUP]
                if bits == 4:
                    code = (code >> np.uint8(4 * (group // chunks))) & np.uint8(15)
                out[i, b * block_size + k] = np.float32(code) * scale + minimum
