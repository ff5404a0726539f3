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

FLOAT = ir.FloatType()
MOST_LANES = 16  # one register of AVX-512, two of AVX2


def _make_scores(num_rows: int) -> Callable[..., Any]:
    @intrinsic(prefer_literal=True)
    def scores(typing_context, out, queries, row, keys, head_dim, block_size):
        def generate(context, builder, signature, arguments):
            out_data, query_data, key_data, first = _pointers(context, builder, signature, arguments, (0, 1, 3), 2)
            width, length = head_dim.literal_value, block_size.literal_value
            lanes = math.gcd(length, MOST_LANES)
            vector = ir.VectorType(FLOAT, lanes)
            for t in range(0, length, lanes):
                sums = [cgutils.alloca_once_value(builder, ir.Constant(vector, None)) for _ in range(num_rows)]
                with cgutils.for_range(builder, _int64(width)) as loop:
                    place = builder.add(builder.mul(loop.index, _int64(length)), _int64(t))
                    key = _load(builder, key_data, place, lanes, signature.args[3].dtype)
                    for r, total in enumerate(sums):
                        start = builder.mul(builder.add(first, _int64(r)), _int64(width))
                        query = _splat(builder, builder.load(builder.gep(query_data, [builder.add(start, loop.index)])), vector)
                        builder.store(builder.call(_multiply_add(builder, vector), [query, key, builder.load(total)]), total)
                for r, total in enumerate(sums):
                    start = builder.mul(builder.add(first, _int64(r)), _int64(length))
                    _store(builder, out_data, builder.add(start, _int64(t)), builder.load(total))
            return context.get_dummy_value()

        return types.none(out, queries, row, keys, head_dim, block_size), generate

    return scores


def _make_add_weighted(num_rows: int) -> Callable[..., Any]:
    @intrinsic(prefer_literal=True)
    def add_weighted(typing_context, out, weights, row, values, low, high, head_dim, block_size):
        def generate(context, builder, signature, arguments):
            out_data, weight_data, value_data, first = _pointers(context, builder, signature, arguments, (0, 1, 3), 2)
            begin, end = (context.cast(builder, arguments[i], signature.args[i], types.int64) for i in (4, 5))
            width, length = head_dim.literal_value, block_size.literal_value
            lanes = math.gcd(width, MOST_LANES)
            vector = ir.VectorType(FLOAT, lanes)
            for d in range(0, width, lanes):
                places = [
                    builder.add(builder.mul(builder.add(first, _int64(r)), _int64(width)), _int64(d)) for r in range(num_rows)
                ]
                before = [_load(builder, out_data, place, lanes, types.float32) for place in places]
                sums = [cgutils.alloca_once_value(builder, value) for value in before]
                with cgutils.for_range(builder, end, start=begin) as loop:
                    place = builder.add(builder.mul(loop.index, _int64(width)), _int64(d))
                    value = _load(builder, value_data, place, lanes, signature.args[3].dtype)
                    for r, total in enumerate(sums):
                        start = builder.mul(builder.add(first, _int64(r)), _int64(length))
                        weight = _splat(builder, builder.load(builder.gep(weight_data, [builder.add(start, loop.index)])), vector)
                        builder.store(builder.call(_multiply_add(builder, vector), [weight, value, builder.load(total)]), total)
                for place, total in zip(places, sums, strict=True):
                    _store(builder, out_data, place, builder.load(total))
            return context.get_dummy_value()

        return types.none(out, weights, row, values, low, high, head_dim, block_size), generate

    return add_weighted


def _make_reduction(combine: Callable[..., Any]) -> Callable[..., Any]:
    @intrinsic(prefer_literal=True)
    def reduce(typing_context, x, row, length):
        def generate(context, builder, signature, arguments):
            data, first = _pointers(context, builder, signature, arguments, (0,), 1)
            count = length.literal_value
            lanes = math.gcd(count, MOST_LANES)
            start = builder.mul(first, _int64(count))
            chunks = [_load(builder, data, builder.add(start, _int64(i)), lanes, types.float32) for i in range(0, count, lanes)]
            result = functools.reduce(functools.partial(combine, builder), chunks)
            while lanes > 1:
                lanes //= 2
                halves = [_take(builder, result, range(begin, begin + lanes)) for begin in (0, lanes)]
                result = combine(builder, *halves)
            return builder.extract_element(result, ir.Constant(ir.IntType(32), 0))

        return types.float32(x, row, length), generate

    return reduce


# scores(out, queries, row, keys, head_dim, block_size): out[row + r, t] = queries[row + r] . keys[:, t] for r < 1, 2, 3, 4;
# queries [rows, head_dim], keys [head_dim, block_size], out [rows, block_size]
scores1, scores2, scores3, scores4 = map(_make_scores, (1, 2, 3, 4))
# add_weighted(out, weights, row, values, low, high, head_dim, block_size): out[row + r] += sum over t in low..high-1 of
# weights[row + r, t] * values[t]; out [rows, head_dim], weights [rows, block_size], values [block_size, head_dim]
add_weighted1, add_weighted2, add_weighted3, add_weighted4 = map(_make_add_weighted, (1, 2, 3, 4))
# largest(x, row, length) and total(x, row, length) of x[row], x [rows, length]; `largest` may overlook a NaN
largest = _make_reduction(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
total = _make_reduction(lambda builder, a, b: builder.fadd(a, b))


def _pointers(context, builder, signature, arguments, arrays, row):
    """Data pointers of contiguous array arguments, and the row as an int64."""
    data = [context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in arrays]
    return *data, context.cast(builder, arguments[row], signature.args[row], types.int64)


def _int64(value: int) -> ir.Constant:
    return ir.Constant(ir.IntType(64), value)


def _take(builder, vector, lanes):
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _multiply_add(builder, vector):
    """x * y + z, in one rounding where the processor can."""
    name = f"llvm.fmuladd.v{vector.count}f32"
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)


def _splat(builder, scalar, vector):
    zero = ir.Constant(ir.IntType(32), 0)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, zero)
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), lanes)


def _load(builder, data, place, lanes, dtype):
    """Elements place..place+lanes-1 as float32, stored as `cpu_math.widen` knows them."""
    stored = {types.float32: FLOAT, types.uint16: ir.IntType(16), types.int16: ir.HalfType()}[dtype]
    pointer = builder.bitcast(builder.gep(data, [place]), ir.VectorType(stored, lanes).as_pointer())
    loaded = builder.load(pointer)
    loaded.align = 2 if dtype.bitwidth == 16 else 4
    wide = ir.VectorType(FLOAT, lanes)
    if dtype == types.int16:
        return builder.fpext(loaded, wide)
    if dtype == types.uint16:
        integers = ir.VectorType(ir.IntType(32), lanes)
        return builder.bitcast(builder.shl(builder.zext(loaded, integers), ir.Constant(integers, [16] * lanes)), wide)
    return loaded


def _store(builder, data, place, value):
    instruction = builder.store(value, builder.bitcast(builder.gep(data, [place]), value.type.as_pointer()))
    instruction.align = 4
