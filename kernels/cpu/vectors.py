"""Products of blocks of the KV cache with a few rows at once, in LLVM's vector types, for use inside numba's loops.
Dimensions are constants of the compiled code; arrays are contiguous.

Written as vectors because the accumulators must stay in registers, which LLVM's own vectoriser does not find through arrays. Each
row has its own accumulators and its own order of summation: its bits do not depend on how many rows, or blocks, are taken together.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.ir import (
    FLOAT,
    INT32,
    LANES,
    LINE,
    at,
    call,
    int64,
    integers,
    load_wide,
    pointers,
    prefetch,
    splat,
    store,
    switch,
)
from kernels.cpu.pairs import PAIR, add_products, load_pairs
from kernels.cpu.tiles import WIDE

MOST_ROWS = 6 if WIDE else 4  # that are multiplied with blocks together, as many as the registers hold
VALUE_VECTORS = 4  # of a row that `add_weighted` keeps in registers at once
# Of a row's scores that `score` keeps in registers at once. A multiplication takes four cycles, in which others must begin: with
# a vector of 16 tokens a row, three rows would wait for each other.
SCORE_VECTORS = 4 if WIDE else 1


def blocks_at_once(block_size: int) -> int:
    """That `score` takes at most."""
    return max(1, SCORE_VECTORS * math.gcd(block_size, LANES) // block_size)


@intrinsic(prefer_literal=True)
def score(typing_context, count, out, place, stride, queries, row, keys, values, table, first, blocks, head, head_dim, block_size):
    """out[place + r * stride + b * block_size + t] = queries[row + r] . key t of block table[first + b] of `head`, for
    r < count <= MOST_ROWS and b < blocks <= blocks_at_once(block_size). The blocks' values, which are read soon, are asked for.

    `out` is flat, `queries` [rows, head_dim], or words of pairs along head_dim; `keys` and `values` are the caches."""

    def generate(context, builder, signature, arguments):
        out_data, query_data = pointers(context, builder, signature, arguments, (1, 4))
        number, target, step, first_row = integers(context, builder, signature, arguments, (0, 2, 3, 5))
        start, num_blocks, head_index = integers(context, builder, signature, arguments, (9, 10, 11))
        length, dtype = block_size.literal_value, signature.args[6].dtype
        elements = head_dim.literal_value * length
        paired = signature.args[4].dtype == types.uint32
        width = head_dim.literal_value // PAIR if paired else head_dim.literal_value  # of a row of queries
        taken = length * (PAIR if paired else 1)  # elements of a block that a step over `width` multiplies
        lanes = math.gcd(length, LANES)
        vector = ir.VectorType(FLOAT, lanes)
        line = LINE * 8 // dtype.bitwidth  # elements
        unroll = math.gcd(width, max(1, line // taken))  # so that each line is asked for once

        def load_keys(block, d, t):
            at_token = builder.add(builder.mul(d, int64(taken)), int64(t))
            if paired:
                return load_pairs(builder, block, at_token, builder.add(at_token, int64(length)), lanes)
            return load_wide(builder, block, at_token, lanes, dtype)

        def emit_piece(num_rows, key_blocks, value_blocks, columns):
            """Scores of the vectors `columns`, each (block, first token)."""
            sums = {
                (r, column): cgutils.alloca_once_value(builder, ir.Constant(vector, None))
                for r in range(num_rows)
                for column in columns
            }
            with cgutils.for_range(builder, int64(width // unroll)) as loop:
                first_d = builder.mul(loop.index, int64(unroll))
                for block in value_blocks:
                    for element in range(0, unroll * taken, line):
                        prefetch(builder, at(builder, block, builder.add(builder.mul(first_d, int64(taken)), int64(element))))
                for i in range(unroll):
                    d = builder.add(first_d, int64(i))
                    loaded = {column: load_keys(key_blocks[column[0]], d, column[1]) for column in columns}
                    for r in range(num_rows):
                        query_row = builder.mul(builder.add(first_row, int64(r)), int64(width))
                        query = builder.load(at(builder, query_data, builder.add(query_row, d)))
                        for column, key in loaded.items():
                            total = sums[r, column]
                            builder.store(_add_product(builder, builder.load(total), splat(builder, query, key.type), key), total)
            for (r, (block, t)), total in sums.items():
                at_row = builder.add(target, builder.mul(step, int64(r)))
                store(builder, out_data, builder.add(at_row, int64(block * length + t)), builder.load(total))

        def emit(case):
            num_rows, count = divmod(case, _CASES)
            key_blocks, value_blocks = (
                [
                    _block(context, builder, signature, arguments, (cache, 8), builder.add(start, int64(b)), head_index, elements)
                    for b in range(count)
                ]
                for cache in (6, 7)
            )
            columns = [(b, t) for b in range(count) for t in range(0, length, lanes)]
            for i in range(0, len(columns), SCORE_VECTORS):
                emit_piece(num_rows, key_blocks, [] if i else value_blocks, columns[i : i + SCORE_VECTORS])

        cases = [r * _CASES + b for r in range(1, MOST_ROWS + 1) for b in range(1, blocks_at_once(length) + 1)]
        switch(builder, builder.add(builder.mul(number, int64(_CASES)), num_blocks), cases, emit)
        return context.get_dummy_value()

    arguments = (count, out, place, stride, queries, row, keys, values, table, first, blocks, head, head_dim, block_size)
    return types.none(*arguments), generate


_CASES = 64  # more than blocks that are taken at once


@intrinsic(prefer_literal=True)
def add_weighted(
    typing_context, count, out, row, weights, place, stride, values, table, first, low, high, keys, next_table, next_first, head,
    head_dim, block_size,
):  # fmt: skip
    """out[row + r] += sum over t in low..high-1 of weights[place + r * stride + t] * value t, for r < count <= MOST_ROWS. Tokens
    count from the first of block table[first] of `head`. Keys from block next_table[next_first] on are asked for meanwhile.

    `out` is [rows, head_dim], `weights` flat, or words of pairs along t; `values` and `keys` are the caches."""

    def generate(context, builder, signature, arguments):
        out_data, weight_data = pointers(context, builder, signature, arguments, (1, 3))
        number, first_row, source, step = integers(context, builder, signature, arguments, (0, 2, 4, 5))
        start, low_token, high_token, next_start, head_index = integers(context, builder, signature, arguments, (8, 9, 10, 13, 14))
        (next_blocks,) = cgutils.unpack_tuple(
            builder, context.make_array(signature.args[12])(context, builder, arguments[12]).shape
        )
        paired = signature.args[3].dtype == types.uint32
        length, width, dtype = block_size.literal_value, head_dim.literal_value, signature.args[6].dtype
        taken = width * (PAIR if paired else 1)  # elements of a block that a step over tokens multiplies
        lanes = math.gcd(width, LANES)
        zero, one, two = int64(0), int64(1), int64(PAIR)
        if paired:
            step = builder.sdiv(step, two)

        def block_of(cache, table, index):
            return _block(context, builder, signature, arguments, (cache, table), index, head_index, width * length)

        def load_values(block, t, offset, begin, end):
            at_token = builder.add(builder.mul(t, int64(taken)), int64(offset))
            if not paired:
                return load_wide(builder, block, at_token, lanes, dtype)
            pairs = load_pairs(builder, block, at_token, builder.add(at_token, int64(width)), lanes)
            return builder.and_(pairs, _seen_of_pair(builder, builder.mul(t, two), begin, end, pairs.type))

        def emit_block(num_rows, offsets, sums, index, asks):
            """Block `index` of those from `start` on."""
            block = block_of(6, 7, builder.add(start, index))
            tokens = builder.mul(index, int64(length))
            begin, end = builder.sub(low_token, tokens), builder.sub(high_token, tokens)
            begin = builder.select(builder.icmp_signed(">", begin, zero), begin, zero)
            end = builder.select(builder.icmp_signed("<", end, int64(length)), end, int64(length))
            weight, steps = builder.add(source, tokens), (begin, end)
            if paired:
                weight, steps = builder.sdiv(weight, two), (builder.sdiv(begin, two), builder.sdiv(builder.add(end, one), two))
            if asks:
                ahead = builder.add(next_start, index)
                last = builder.sub(next_blocks, one)
                ahead = block_of(11, 12, builder.select(builder.icmp_signed("<", ahead, last), ahead, last))
            with cgutils.for_range(builder, steps[1], start=steps[0]) as loop:
                for element in range(0, taken if asks else 0, LINE * 8 // dtype.bitwidth):
                    prefetch(builder, at(builder, ahead, builder.add(builder.mul(loop.index, int64(taken)), int64(element))))
                loaded = {offset: load_values(block, loop.index, offset, begin, end) for offset in offsets}
                for r in range(num_rows):
                    at_row = builder.add(weight, builder.mul(step, int64(r)))
                    one_weight = builder.load(at(builder, weight_data, builder.add(at_row, loop.index)))
                    for offset, value in loaded.items():
                        factor = splat(builder, one_weight, value.type)
                        total = _add_product(builder, builder.load(sums[r, offset]), factor, value)
                        builder.store(total, sums[r, offset])

        def emit(num_rows):
            for d in range(0, width, lanes * VALUE_VECTORS):
                offsets = range(d, min(width, d + lanes * VALUE_VECTORS), lanes)
                places = {
                    (r, offset): builder.add(builder.mul(builder.add(first_row, int64(r)), int64(width)), int64(offset))
                    for r in range(num_rows)
                    for offset in offsets
                }
                sums = {
                    key: cgutils.alloca_once_value(builder, load_wide(builder, out_data, at_row, lanes, types.float32))
                    for key, at_row in places.items()
                }
                end = builder.sdiv(builder.add(high_token, int64(length - 1)), int64(length))
                with cgutils.for_range(builder, end, start=builder.sdiv(low_token, int64(length))) as loop:
                    emit_block(num_rows, offsets, sums, loop.index, asks=d == 0)
                for key, total in sums.items():
                    store(builder, out_data, places[key], builder.load(total))

        switch(builder, number, range(1, MOST_ROWS + 1), emit)
        return context.get_dummy_value()

    arguments = (count, out, row, weights, place, stride, values, table, first, low, high, keys, next_table, next_first, head)
    return types.none(*arguments, head_dim, block_size), generate


def _block(context, builder, signature, arguments, places, index, head, elements):
    """Pointer to what a cache has of `head` in the block that a table has at `index`; `places` of both among the arguments."""
    cache, table = pointers(context, builder, signature, arguments, places)
    cache_array = context.make_array(signature.args[places[0]])(context, builder, arguments[places[0]])
    num_heads = cgutils.unpack_tuple(builder, cache_array.shape)[1]
    block = builder.sext(builder.load(at(builder, table, index)), ir.IntType(64))
    return at(builder, cache, builder.mul(builder.add(builder.mul(block, num_heads), head), int64(elements)))


def _add_product(builder, total, x, y):
    """total + x * y, in one rounding where the processor can; x and y vectors of float32, or of words of pairs."""
    if x.type.element == INT32:
        return add_products(builder, total, x, y)
    return call(builder, f"llvm.fmuladd.v{x.type.count}f32", total.type, x, y, total)


def _seen_of_pair(builder, t, low, high, words):
    """A word's bits of which of the tokens t and t + 1 are in low..high-1."""
    lower = builder.select(builder.icmp_signed(">=", t, low), ir.Constant(INT32, 0xFFFF), ir.Constant(INT32, 0))
    upper = builder.select(
        builder.icmp_signed("<", builder.add(t, int64(1)), high), ir.Constant(INT32, -(1 << 16)), ir.Constant(INT32, 0)
    )
    return splat(builder, builder.or_(lower, upper), words)
