"""Float32 rows rounded to 8 bits in blocks, as the product with quantized blocks reads them."""

from __future__ import annotations

import functools

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.block_kinds import GROUP, KINDS
from kernels.cpu.compiled import compiled
from kernels.cpu.dot import WORDS
from kernels.cpu.ir import FLOAT, INT8, INT32, LANES, at, call, int64, integers, load_as, pointers, splat, switch
from kernels.cpu.tiles import BLOCK_ROWS, tile_rows

# Beside the codes of a block of a row there are its scale, what its codes stand for in sum, and negative integers, where products
# with codes around a middle begin: the sum of all codes, and the sums of either half times the middle of Q6_K, which alone has two
# scales a block.
SCALE, SUM, TOTAL, FIRST, SECOND = range(5)
BESIDE = 5

_LEAST_MAGNITUDE = float(np.float32(1e-30))  # of a block whose numbers are not taken for zeros
_FLOATS, _MASK, _BYTES = (ir.VectorType(kind, LANES) for kind in (FLOAT, ir.IntType(1), INT8))
_X_BLOCKS = tuple(kind.block for kind in KINDS)
(_MIDDLE_OF_HALVES,) = {1 << kind.middle_shift for kind in KINDS if kind.parts > 1}


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
            put(beside + SCALE, as_word(scale))
            put(beside + SUM, as_word(builder.fmul(scale, builder.sitofp(total, FLOAT))))
            put(beside + TOTAL, builder.neg(total))
            for which, half in zip((FIRST, SECOND), halves, strict=True):
                put(beside + which, builder.mul(half, ir.Constant(INT32, -_MIDDLE_OF_HALVES)))

        switch(builder, number, sorted(set(_X_BLOCKS)), emit)
        return context.get_dummy_value()

    return types.none(size, packed, place, stride, x, start), generate
