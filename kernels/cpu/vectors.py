"""Products of a block of the KV cache with a few rows at once, in LLVM's vector types, for use inside numba's loops.
Dimensions are constants of the compiled code; arrays are contiguous.

Written as vectors because the accumulators must stay in registers, which LLVM's own vectoriser does not find through arrays. Each
row has its own accumulators and its own order of summation: its bits do not depend on how many rows are taken together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

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
    take,
)
from kernels.cpu.pairs import PAIR, add_products, load_pairs
from kernels.cpu.tiles import WIDE

MOST_ROWS = 6 if WIDE else 4  # that are multiplied with a block together, as many as the registers hold
VALUE_VECTORS = 4  # of a row that `add_weighted` keeps in registers at once
CHAINS = 2  # partial sums a row has in `score`: a multiplication takes four cycles, in which others must begin


@intrinsic(prefer_literal=True)
def score(typing_context, count, out, place, stride, queries, row, keys, head_dim, block_size):
    """out[place + r * stride + t] = queries[row + r] . keys[:, t] for r < count <= MOST_ROWS.

    `out` is flat, `queries` [rows, head_dim], or words of pairs along head_dim, `keys` [head_dim, block_size]."""

    def generate(context, builder, signature, arguments):
        out_data, query_data, key_data = pointers(context, builder, signature, arguments, (1, 4, 6))
        number, target, step, first = integers(context, builder, signature, arguments, (0, 2, 3, 5))
        length = block_size.literal_value
        paired = signature.args[4].dtype == types.uint32
        width = head_dim.literal_value // PAIR if paired else head_dim.literal_value  # of a row of queries
        lanes, chains = math.gcd(length, LANES), math.gcd(width, CHAINS)
        vector = ir.VectorType(FLOAT, lanes)

        def load_keys(d, t):
            place = builder.add(builder.mul(d, int64(PAIR * length if paired else length)), int64(t))
            if paired:
                return load_pairs(builder, key_data, place, builder.add(place, int64(length)), lanes)
            return load_wide(builder, key_data, place, lanes, signature.args[6].dtype)

        def emit(num_rows):
            for t in range(0, length, lanes):
                sums = [
                    [cgutils.alloca_once_value(builder, ir.Constant(vector, None)) for _ in range(chains)] for _ in range(num_rows)
                ]
                with cgutils.for_range(builder, int64(width // chains)) as loop:
                    for chain in range(chains):
                        d = builder.add(builder.mul(loop.index, int64(chains)), int64(chain))
                        key = load_keys(d, t)
                        for r in range(num_rows):
                            start = builder.mul(builder.add(first, int64(r)), int64(width))
                            query = builder.load(at(builder, query_data, builder.add(start, d)))
                            total = sums[r][chain]
                            builder.store(_add_product(builder, builder.load(total), splat(builder, query, key.type), key), total)
                for r in range(num_rows):
                    total = functools.reduce(builder.fadd, [builder.load(part) for part in sums[r]])
                    line = builder.add(target, builder.mul(step, int64(r)))
                    store(builder, out_data, builder.add(line, int64(t)), total)

        switch(builder, number, range(1, MOST_ROWS + 1), emit)
        return context.get_dummy_value()

    return types.none(count, out, place, stride, queries, row, keys, head_dim, block_size), generate


@intrinsic(prefer_literal=True)
def add_weighted(typing_context, count, out, row, weights, place, stride, values, low, high, head_dim):
    """out[row + r] += sum over t in low..high-1 of weights[place + r * stride + t] * values[t], for r < count <= MOST_ROWS.

    `out` is [rows, head_dim], `weights` flat, or words of pairs along t, `values` [block_size, head_dim]."""

    def generate(context, builder, signature, arguments):
        out_data, weight_data, value_data = pointers(context, builder, signature, arguments, (1, 3, 6))
        number, first, source, step, first_token, end_token = integers(context, builder, signature, arguments, (0, 2, 4, 5, 7, 8))
        paired = signature.args[3].dtype == types.uint32
        one, two = int64(1), int64(PAIR)
        begin, end = first_token, end_token  # of the loop over tokens, or over pairs of them
        if paired:
            source, step, begin, end = (builder.sdiv(each, two) for each in (source, step, begin, builder.add(end, one)))
        width = head_dim.literal_value
        lanes = math.gcd(width, LANES)

        def load_values(t, offset):
            place = builder.add(builder.mul(t, int64(PAIR * width if paired else width)), int64(offset))
            if not paired:
                return load_wide(builder, value_data, place, lanes, signature.args[6].dtype)
            values = load_pairs(builder, value_data, place, builder.add(place, int64(width)), lanes)
            return builder.and_(values, _seen_of_pair(builder, builder.mul(t, two), first_token, end_token, values.type))

        def emit(num_rows):
            for d in range(0, width, lanes * VALUE_VECTORS):
                offsets = range(d, min(width, d + lanes * VALUE_VECTORS), lanes)
                places = {
                    (r, offset): builder.add(builder.mul(builder.add(first, int64(r)), int64(width)), int64(offset))
                    for r in range(num_rows)
                    for offset in offsets
                }
                sums = {
                    key: cgutils.alloca_once_value(builder, load_wide(builder, out_data, at_row, lanes, types.float32))
                    for key, at_row in places.items()
                }
                with cgutils.for_range(builder, end, start=begin) as loop:
                    loaded = {offset: load_values(loop.index, offset) for offset in offsets}
                    for r in range(num_rows):
                        start = builder.add(source, builder.mul(step, int64(r)))
                        weight = builder.load(at(builder, weight_data, builder.add(start, loop.index)))
                        for offset in offsets:
                            total, value = sums[r, offset], loaded[offset]
                            builder.store(
                                _add_product(builder, builder.load(total), splat(builder, weight, value.type), value), total
                            )
                for key, total in sums.items():
                    store(builder, out_data, places[key], builder.load(total))

        switch(builder, number, range(1, MOST_ROWS + 1), emit)
        return context.get_dummy_value()

    return types.none(count, out, row, weights, place, stride, values, low, high, head_dim), generate


def _make_reduction(combine: Callable[..., Any]) -> Callable[..., Any]:
    @intrinsic(prefer_literal=True)
    def reduce(typing_context, x, row, length):
        def generate(context, builder, signature, arguments):
            (data,) = pointers(context, builder, signature, arguments, (0,))
            (first,) = integers(context, builder, signature, arguments, (1,))
            count = length.literal_value
            lanes = math.gcd(count, LANES)
            start = builder.mul(first, int64(count))
            chunks = [load_wide(builder, data, builder.add(start, int64(i)), lanes, types.float32) for i in range(0, count, lanes)]
            result = functools.reduce(functools.partial(combine, builder), chunks)
            while lanes > 1:
                lanes //= 2
                halves = [take(builder, result, range(begin, begin + lanes)) for begin in (0, lanes)]
                result = combine(builder, *halves)
            return builder.extract_element(result, ir.Constant(INT32, 0))

        return types.float32(x, row, length), generate

    return reduce


@intrinsic(prefer_literal=True)
def prefetch_block(typing_context, cache, block, head, head_dim, block_size):
    """Asks for what a block of the cache has of a head, which is read soon."""

    def generate(context, builder, signature, arguments):
        (data,) = pointers(context, builder, signature, arguments, (0,))
        block_index, head_index = integers(context, builder, signature, arguments, (1, 2))
        shape = cgutils.unpack_tuple(builder, context.make_array(signature.args[0])(context, builder, arguments[0]).shape)
        elements = head_dim.literal_value * block_size.literal_value
        place = builder.mul(builder.add(builder.mul(block_index, shape[1]), head_index), int64(elements))
        step = LINE // (signature.args[0].dtype.bitwidth // 8)
        with cgutils.for_range(builder, int64(elements // step)) as loop:
            prefetch(builder, at(builder, data, builder.add(place, builder.mul(loop.index, int64(step)))))
        return context.get_dummy_value()

    return types.none(cache, block, head, head_dim, block_size), generate


# largest(x, row, length) and total(x, row, length) of x[row], x [rows, length]; `largest` may overlook a NaN
largest = _make_reduction(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
total = _make_reduction(lambda builder, a, b: builder.fadd(a, b))


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
