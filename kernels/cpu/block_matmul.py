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
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from kernels.cpu.block_kinds import KINDS, find_kind, load_halves, pack_records
from kernels.cpu.compiled import compiled
from kernels.cpu.crew import CHUNK_BYTES, OPERANDS, make_task, pointer_to, share
from kernels.cpu.dot import WORDS, dot_bytes
from kernels.cpu.ir import (
    FLOAT,
    INT32,
    LANES,
    LINE,
    at,
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
from kernels.cpu.quantized_blocks import Blocks
from kernels.cpu.rounded_rows import BESIDE, FIRST, SCALE, SECOND, SUM, TOTAL
from kernels.cpu.tiles import BLOCK_PANEL, BLOCK_ROWS, copy_tile, tile_rows

PANEL = BLOCK_PANEL
_FLOATS = ir.VectorType(FLOAT, LANES)

# What one row reads of the weights comes from memory: so far ahead it is asked for, in bytes. The processor itself looks ahead too,
# but neither across pages nor while it is busy with a row's products.
AHEAD = 4096

# Columns of `segments`: parts of a matrix that are of one kind.
_KIND, _FIRST_PANEL, _FIRST_COLUMN, _END_COLUMN, _OFFSET, _RECORDS = range(6)
SEGMENT_FIELDS = 6

# Operands of the task, on the board.
_OUT, _ROWS, _COLUMNS, _X, _RECORDS_AT, _NUM_RECORDS, _FROM, _TO = range(OPERANDS, OPERANDS + 8)

_RECORD_BYTES = tuple(kind.record_bytes for kind in KINDS)


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
                sums = (TOTAL,) if kind.parts == 1 else (FIRST, SECOND)
                loaded = [[load_as(builder, word(r, which), INT32, 4) for r in range(height)] for which in sums]
                products = [[splat(builder, each, WORDS) for each in some] for some in loaded]
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
                        total = multiply_add(builder, minimum, number_of(r, SUM), total)
                    exact = builder.sitofp(products[part][r], _FLOATS)
                    scaled = builder.fmul(scale, number_of(r, SCALE))
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
