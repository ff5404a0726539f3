"""Product of float32 rows with quantized weights as they are, on the CPU: codes of 4 to 8 bits in blocks that share a scale.

A row's activations are rounded to 8 bits in blocks of their own, each with a scale, so that an outlier costs its block alone its
precision. Products of a block are summed in integers, exactly, blocks in float32 in a fixed order: the same bits on every
processor, whatever instruction multiplies bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from kernels.cpu.block_kinds import GROUP, KINDS, find_kind, load_halves, pack_records
from kernels.cpu.compiled import compiled
from kernels.cpu.crew import CHUNK_BYTES, OPERANDS, make_task, pointer_to, share
from kernels.cpu.dot import WORDS, dot_bytes
from kernels.cpu.ir import (
    FLOAT,
    INT8,
    INT32,
    LANES,
    LINE,
    at,
    call,
    int64,
    integers,
    load_as,
    multiply_add,
    pointers,
    prefetch,
    splat,
    store,
    switch,
)
from kernels.cpu.math import widen
from kernels.cpu.quantized_blocks import Blocks
from kernels.cpu.tiles import BLOCK_PANEL, BLOCK_ROWS, copy_tile, tile_rows

PANEL = BLOCK_PANEL
_FLOATS, _MASK, _BYTES = (ir.VectorType(kind, LANES) for kind in (FLOAT, ir.IntType(1), INT8))
_LEAST_MAGNITUDE = float(np.float32(1e-30))  # of a block whose numbers are not taken for zeros

# Beside the codes of a block of a row, `quantize_rows` keeps its scale, what its codes stand for in sum, and negative integers: the
# sum of all codes, and the sums of either half times the middle of the one kind with two scales a block, Q6_K: products begin there.
_SCALE, _SUM, _TOTAL, _FIRST, _SECOND = range(5)
BESIDE = 5

# What one row reads of the weights comes from memory: so far ahead it is asked for, in bytes. The processor itself looks ahead too,
# but neither across pages nor while it is busy with a row's products.
AHEAD = 4096

# Columns of `segments`: parts of a matrix that are of one kind.
_KIND, _FIRST_PANEL, _FIRST_COLUMN, _END_COLUMN, _OFFSET, _RECORDS = range(6)
SEGMENT_FIELDS = 6

# Operands of the task, on the board.
_OUT, _ROWS, _COLUMNS, _X, _RECORDS_AT, _NUM_RECORDS, _FROM, _TO = range(OPERANDS, OPERANDS + 8)

_X_BLOCKS = tuple(kind.block for kind in KINDS)
_RECORD_BYTES = tuple(kind.record_bytes for kind in KINDS)
_RECORD_BLOCKS = tuple(kind.blocks for kind in KINDS)
_CODE_BYTES = tuple(kind.code_bytes for kind in KINDS)
_NUM_BITS = tuple(kind.bits for kind in KINDS)
_SIZES = tuple(kind.size for kind in KINDS)
_SPANS = tuple(kind.span for kind in KINDS)
_MIDDLES = tuple(1 << kind.middle_shift if kind.is_symmetric else 0 for kind in KINDS)
(_MIDDLE_OF_PARTS,) = {middle for kind, middle in zip(KINDS, _MIDDLES, strict=True) if kind.parts > 1}
_MINIMA_OFFSETS = tuple(kind.minima_offset for kind in KINDS)
_FACTORS_OFFSETS = tuple(kind.factors_offset for kind in KINDS)


@dataclass
class PackedBlocks:
    """Matrices of blocks, one's rows after the other's, as the product reads them."""

    records: NDArray[np.uint8]  # flat: segment after segment, panel after panel
    segments: NDArray[np.int64]  # [matrices, 6]

    @property
    def out_features(self) -> int:
        return int(self.segments[-1, _END_COLUMN])

    @property
    def in_features(self) -> int:
        return int(self.segments[0, _RECORDS]) * KINDS[int(self.segments[0, _KIND])].columns


def pack_blocks(matrices: Sequence[Blocks]) -> PackedBlocks:
    """Matrices of equal width. Raises ValueError where there is no kernel for such blocks."""
    records, segments, panel, column, offset = [], [], 0, 0, 0
    for blocks in matrices:
        number = find_kind(blocks)
        packed = pack_records(blocks, KINDS[number])
        end_column = column + len(blocks.codes)
        segments.append((number, panel, column, end_column, offset, packed.shape[1]))
        records.append(packed.reshape(-1))
        panel, column, offset = panel + len(packed), end_column, offset + packed.size
    if len({KINDS[segment[_KIND]].block for segment in segments}) > 1:
        raise ValueError("there is no product of rows with blocks of different width")
    return PackedBlocks(np.concatenate(records) if len(records) > 1 else records[0], np.array(segments, np.int64))


def block_rows(packed: PackedBlocks, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` [n] int64 of the weight that was packed, as float32 [n, in_features]."""
    out = np.empty((len(indices), packed.in_features), np.float32)
    _take_rows(out, packed.records, packed.segments, indices.numpy())
    return torch.from_numpy(out)


@intrinsic(prefer_literal=True)
def _tile(typing_context, kind, rows, out, place, stride, x, first_word, records, offset, num_records, ahead, step, lines):
    """A panel's product of `rows` rows, whose words begin at x[first_word], goes to out[place + r * stride + c].

    `out`, `x`, `records` are flat; the panel's `num_records` records of kind KINDS[kind] begin at records[offset]. While block b of
    the panel goes by, `lines` cache lines are asked for from records[ahead + b * step] on.
    """

    def generate(context, builder, signature, arguments):
        out_data, x_data, record_data = pointers(context, builder, signature, arguments, (2, 5, 7))
        num_rows, start, stride_value, x_start = integers(context, builder, signature, arguments, (1, 3, 4, 6))
        first_byte, count, first_ahead, step_ahead, num_lines = integers(context, builder, signature, arguments, (8, 9, 10, 11, 12))
        tile = at(builder, x_data, x_start)
        panel = at(builder, record_data, first_byte)
        far = at(builder, record_data, first_ahead)

        def emit_block(kind, height, totals, record, factors, index, block):
            """`index`: of the block in its panel, `block`: in its record, both int64."""
            words = at(builder, tile, builder.mul(index, int64((kind.groups + BESIDE) * height)))
            beside = at(builder, words, kind.groups * height)
            with cgutils.for_range(builder, num_lines) as loop:
                line = builder.add(builder.mul(index, step_ahead), builder.mul(loop.index, int64(LINE)))
                prefetch(builder, at(builder, far, line))

            def word(r, which):
                return at(builder, beside, which * height + r)

            def number_of(r, which):
                return splat(builder, builder.load(builder.bitcast(word(r, which), FLOAT.as_pointer())), _FLOATS)

            products = [[ir.Constant(WORDS, None)] * height for _ in range(kind.parts)]
            if kind.is_symmetric:
                sums = (_TOTAL,) if kind.parts == 1 else (_FIRST, _SECOND)
                products = [
                    [splat(builder, load_as(builder, word(r, each), INT32, 4), WORDS) for r in range(height)] for each in sums
                ]
                if kind.parts == 1:
                    shift = ir.Constant(WORDS, [kind.middle_shift] * LANES)
                    products = [[builder.shl(each, shift) for each in products[0]]]
            codes = at(builder, record, builder.mul(block, int64(kind.code_bytes)))
            for group, columns in kind.load_codes(builder, codes):
                some = products[group * kind.parts // kind.groups]
                for r in range(height):
                    signed = splat(builder, load_as(builder, at(builder, words, group * height + r), INT32, 4), WORDS)
                    some[r] = dot_bytes(builder, some[r], columns, signed, kind.bits)
            for part in range(kind.parts):
                place = builder.mul(builder.add(builder.mul(block, int64(kind.parts)), int64(part)), int64(kind.number_bytes))
                scales = at(builder, record, builder.add(place, int64(kind.blocks * kind.code_bytes)))
                scale = kind.load_numbers(builder, scales, factors and factors[0])
                minimum = None
                if not kind.is_symmetric:
                    minima = at(builder, record, builder.add(place, int64(kind.minima_offset)))
                    minimum = kind.load_numbers(builder, minima, factors and factors[1])
                for r in range(height):
                    total = builder.load(totals[r])
                    if minimum is not None:
                        total = multiply_add(builder, minimum, number_of(r, _SUM), total)
                    exact = builder.sitofp(products[part][r], _FLOATS)
                    scaled = builder.fmul(scale, number_of(r, _SCALE))
                    builder.store(multiply_add(builder, exact, scaled, total), totals[r])

        def emit(kind, height):
            totals = [cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, None)) for _ in range(height)]
            with cgutils.for_range(builder, count) as loop:
                record = at(builder, panel, builder.mul(loop.index, int64(kind.record_bytes)))
                if not kind.span:
                    emit_block(kind, height, totals, record, None, loop.index, int64(0))
                else:
                    places = range(kind.factors_offset, kind.record_bytes, 2 * LANES)
                    factors = [load_halves(builder, at(builder, record, place)) for place in places]
                    first = builder.mul(loop.index, int64(kind.blocks))
                    with cgutils.for_range(builder, int64(kind.blocks)) as inner:
                        emit_block(kind, height, totals, record, factors, builder.add(first, inner.index), inner.index)
            for r in range(height):
                store(builder, out_data, builder.add(start, builder.mul(stride_value, int64(r))), builder.load(totals[r]))

        switch(builder, num_rows, range(1, BLOCK_ROWS + 1), functools.partial(emit, KINDS[kind.literal_value]))
        return context.get_dummy_value()

    arguments = (kind, rows, out, place, stride, x, first_word, records, offset, num_records, ahead, step, lines)
    return types.none(*arguments), generate


def _make_task(kind: int) -> int:
    """A kind has code of its own, so that a model compiles that of the kinds which it has."""
    record_bytes, record_blocks = KINDS[kind].record_bytes, KINDS[kind].blocks
    block_words = KINDS[kind].groups + BESIDE

    def multiply(board, begin, end):
        """Panels begin..end-1 of a segment of a product; x as `quantize_rows` packs it."""
        rows, columns, first_column, end_column = board[_ROWS], board[_COLUMNS], board[_FROM], board[_TO]
        flat = carray(pointer_to(board[_OUT], np.float32), (rows * columns,))
        x = carray(pointer_to(board[_X], np.int32), (1,))
        records = carray(pointer_to(board[_RECORDS_AT], np.uint8), (1,))
        scratch = np.empty((BLOCK_ROWS, PANEL), np.float32)
        out, flat_scratch = flat.reshape(rows, columns), scratch.reshape(-1)
        tiles = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
        num_records = board[_NUM_RECORDS]
        panel_bytes, blocks = num_records * record_bytes, num_records * record_blocks
        # Bytes that a tile asks for while a block goes by: of what comes AHEAD where it is the only tile, else its share of the
        # next panel, which the last tile leaves in the cache.
        step = (panel_bytes + tiles * blocks - 1) // (tiles * blocks)
        lines = (step + LINE - 1) // LINE
        for panel in range(begin, end):
            column = first_column + panel * PANEL
            is_whole = column + PANEL <= end_column
            target, stride = (flat, columns) if is_whole else (flat_scratch, PANEL)
            start = panel * panel_bytes
            ahead = start + (AHEAD if tiles == 1 else panel_bytes)
            row = 0
            while row < rows:
                count, first_word = tile_rows(row, rows, BLOCK_ROWS), row * blocks * block_words
                place = row * columns + column if is_whole else 0
                _tile(kind, count, target, place, stride, x, first_word, records, start, num_records, ahead, step, lines)
                if not is_whole:
                    copy_tile(out, row, column, end_column, scratch, count)
                row += count
                ahead += blocks * step

    return make_task(multiply)


@functools.cache
def task(kind: int) -> int:
    """Of `crew.share`: the panels of a segment of this kind."""
    return _make_task(kind)


@compiled()
def multiply(out, words, records, segments, tasks, board):
    """out [rows, out_features] = the rows that `quantize_rows` packed times packed blocks, with the helpers that `board` has.

    records: their address; tasks: that of each segment's kind.
    """
    board[_OUT], board[_ROWS], board[_COLUMNS], board[_X] = out.ctypes.data, out.shape[0], out.shape[1], words.ctypes.data
    for s in range(len(segments)):
        kind, first_column, end_column, num_records = segments[s, 0], segments[s, 2], segments[s, 3], segments[s, 5]
        board[_RECORDS_AT], board[_NUM_RECORDS] = records + segments[s, 4], num_records
        board[_FROM], board[_TO] = first_column, end_column
        num_panels = (end_column - first_column + PANEL - 1) // PANEL
        share(board, tasks[s], num_panels, 1 + CHUNK_BYTES // (num_records * _RECORD_BYTES[kind]))


@compiled()
def quantize_rows(x, segments):
    """x [rows, columns] rounded to -127..127 by the blocks of `segments`' kinds. Returns words, tile by tile, block by block.

    A block has, of each group of four codes, the tile's rows beside each other, then BESIDE numbers, each of all rows.
    """
    rows, columns = x.shape
    block_size = _X_BLOCKS[segments[0, 0]]
    blocks, words = columns // block_size, block_size // GROUP + BESIDE
    flat = x.reshape(-1)
    packed = np.empty(rows * blocks * words, np.int32)
    row = 0
    while row < rows:
        count = tile_rows(row, rows, BLOCK_ROWS)
        for r in range(count):
            for b in range(blocks):
                place = (row * blocks + b * count) * words + r
                _round_block(block_size, packed, place, count, flat, (row + r) * columns + b * block_size)
        row += count
    return packed


@intrinsic
def _round_block(typing_context, size, packed, place, stride, x, start):
    """Rounds x[start:start + size] and puts its words and numbers into packed[place], packed[place + stride] and so on."""

    def generate(context, builder, signature, arguments):
        out_data, x_data = pointers(context, builder, signature, arguments, (1, 4))
        number, target, step, first = integers(context, builder, signature, arguments, (0, 2, 3, 5))
        magnitude_bits = ir.Constant(WORDS, [0x7FFFFFFF] * LANES)
        lowest, infinite = ir.Constant(FLOAT, _LEAST_MAGNITUDE), ir.Constant(INT32, 0x7F800000)
        zero, limit = ir.Constant(FLOAT, 0.0), ir.Constant(FLOAT, 127.0)

        def put(which, value):
            pointer = at(builder, out_data, builder.add(target, builder.mul(step, int64(which))))
            builder.store(value, pointer)

        def as_word(value):
            return builder.bitcast(value, INT32)

        def emit(block_size):
            parts = range(block_size // LANES)
            values = [load_as(builder, at(builder, x_data, builder.add(first, int64(LANES * i))), _FLOATS, 4) for i in parts]
            # As integers, magnitudes are ordered like floats, NaN above all.
            magnitudes = [builder.and_(builder.bitcast(each, WORDS), magnitude_bits) for each in values]
            largest = functools.reduce(lambda a, b: builder.select(builder.icmp_signed(">", a, b), a, b), magnitudes)
            highest = call(builder, f"llvm.vector.reduce.smax.v{LANES}i32", INT32, largest)
            magnitude = builder.bitcast(highest, FLOAT)
            is_finite = builder.icmp_signed("<", highest, infinite)
            is_large = builder.and_(is_finite, builder.fcmp_ordered(">", magnitude, lowest))
            scale = builder.select(is_finite, builder.fdiv(magnitude, limit), ir.Constant(FLOAT, float("nan")))
            inverse = builder.select(is_large, builder.fdiv(limit, magnitude), zero)
            factor = splat(builder, inverse, _FLOATS)
            codes = []
            for each in values:
                rounded = call(builder, f"llvm.rint.v{LANES}f32", _FLOATS, builder.fmul(each, factor))
                codes.append(
                    builder.select(splat(builder, is_large, _MASK), builder.fptosi(rounded, WORDS), ir.Constant(WORDS, None))
                )
            for i, each in enumerate(codes):
                words = builder.bitcast(builder.trunc(each, _BYTES), ir.VectorType(INT32, LANES // GROUP))
                for j in range(LANES // GROUP):
                    put(i * LANES // GROUP + j, builder.extract_element(words, ir.Constant(INT32, j)))
            halves = []
            for some in (codes[: len(codes) // 2], codes[len(codes) // 2 :]):
                halves.append(call(builder, f"llvm.vector.reduce.add.v{LANES}i32", INT32, functools.reduce(builder.add, some)))
            total = builder.add(*halves)
            beside = block_size // GROUP
            put(beside + _SCALE, as_word(scale))
            put(beside + _SUM, as_word(builder.fmul(scale, builder.sitofp(total, FLOAT))))
            put(beside + _TOTAL, builder.neg(total))
            for which, half in zip((_FIRST, _SECOND), halves, strict=True):
                put(beside + which, builder.mul(half, ir.Constant(INT32, -_MIDDLE_OF_PARTS)))

        switch(builder, number, sorted(set(_X_BLOCKS)), emit)
        return context.get_dummy_value()

    return types.none(size, packed, place, stride, x, start), generate


@compiled()
def _take_rows(out, records, segments, indices):
    for i in range(len(indices)):
        s = 0
        while indices[i] >= segments[s, 3]:
            s += 1
        kind, row = segments[s, 0], indices[i] - segments[s, 2]
        panel_bytes = segments[s, 5] * _RECORD_BYTES[kind]
        start = segments[s, 4] + row // PANEL * panel_bytes
        panel = records[start : start + panel_bytes].reshape(segments[s, 5], _RECORD_BYTES[kind])
        _take_row(out[i], panel, kind, row % PANEL)


@compiled()
def _take_row(out, panel, kind, lane):
    block_size, num_blocks, size = _X_BLOCKS[kind], _RECORD_BLOCKS[kind], _SIZES[kind]
    scales_offset, minima_offset, factors_offset = num_blocks * _CODE_BYTES[kind], _MINIMA_OFFSETS[kind], _FACTORS_OFFSETS[kind]
    middle = np.float32(_MIDDLES[kind])
    width = block_size * num_blocks
    for b in range(len(panel)):
        record = panel[b]
        factor = minimum_factor = np.float32(1.0)
        if _SPANS[kind]:
            factor = _half_at(record, factors_offset + 2 * lane)
            if not middle:
                minimum_factor = _half_at(record, factors_offset + 2 * (PANEL + lane))
        for k in range(width):
            code = _code_at(record, k // block_size * _CODE_BYTES[kind], _NUM_BITS[kind], block_size // GROUP, k % block_size, lane)
            number = k // size * PANEL + lane
            scale = factor * _number_at(record, scales_offset, number, _SPANS[kind] > 0)
            value = (np.float32(code) - middle) * scale
            if not middle:
                value += minimum_factor * _number_at(record, minima_offset, number, _SPANS[kind] > 0)
            out[b * width + k] = value


@compiled()
def _number_at(record, offset, number, is_whole):
    if is_whole:
        return np.float32(np.int8(record[offset + number]))
    return _half_at(record, offset + 2 * number)


@compiled()
def _half_at(record, place):
    return widen(np.int16(np.uint16(record[place]) | np.uint16(record[place + 1]) << np.uint16(8)))


@compiled()
def _code_at(record, begin, bits, groups, k, lane):
    """Code of column `k` of the block whose codes begin at record[begin]."""
    chunk, group = 4 * LANES, k // GROUP
    byte = lane * GROUP + k % GROUP  # of a line
    if bits == 8:
        return np.int32(record[begin + group * chunk + byte])
    half = groups // 2
    low = np.int32(record[begin + group % half * chunk + byte]) >> np.int32(4 * (group // half)) & np.int32(15)
    begin += half * chunk
    if bits == 5:
        high = np.int32(record[begin + group * (chunk // 8) + byte // 8]) >> np.int32(byte % 8) & np.int32(1)
    elif bits == 6:
        high = np.int32(record[begin + group // 4 * chunk + byte]) >> np.int32(2 * (group % 4)) & np.int32(3)
    else:
        high = np.int32(0)
    return low | high << np.int32(4)
