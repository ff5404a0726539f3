"""A row's softmax over spans of the KV cache, span by span, in LLVM's vector types, for use inside numba's loops.

What a row has of the spans before shrinks when a span has a higher score. Each operation rounds once, and a row's operations have
an order of their own: the same bits on every processor, whatever rows stand beside.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.ir import FLOAT, INT16, INT32, LANES, at, call, integers, load_wide, multiply_add, pointers, splat, store, take

_MINUS_INFINITY = float("-inf")
_LOWEST = -87.0  # exp of it, 1.6e-38, is still a normal number; what is lower gives the same
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
# Of exp on -ln(2)/2..ln(2)/2, as in `kernels.cpu.math`: the coefficients of r^7 to r^2.
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


@intrinsic(prefer_literal=True)
def weigh(typing_context, scores, weights, row, low, high, highest, sums, weighted, width, head_dim):
    """Scores of a row over a span become weights, exp(score - highest so far), of the tokens low..high-1, and 0 of others.

    scores  [rows, width], read; weights, written: flat, float32, which may be the scores, or bfloat16 as words of pairs
    highest, sums, weighted  of a row: its highest score so far, and sums of weights and, [head_dim], of weighted values, which
            shrink where the highest grows; the span's weights are added to `sums`
    """

    def generate(context, builder, signature, arguments):
        places = (0, 1, 5, 6, 7)
        score_data, weight_data, highest_data, sum_data, weighted_data = pointers(context, builder, signature, arguments, places)
        row_index, first, end = integers(context, builder, signature, arguments, (2, 3, 4))
        length, size = width.literal_value, head_dim.literal_value
        lanes = math.gcd(length, LANES)
        vector, words = ir.VectorType(FLOAT, lanes), ir.VectorType(INT32, lanes)
        start = builder.mul(row_index, ir.Constant(row_index.type, length))

        def after(place, offset):
            return builder.add(place, ir.Constant(place.type, offset))

        low_words, high_words = (splat(builder, builder.trunc(each, INT32), words) for each in (first, end))
        old = builder.load(at(builder, highest_data, row_index))
        seen, seen_scores = [], []
        for i in range(0, length, lanes):
            token = ir.Constant(words, list(range(i, i + lanes)))
            is_seen = builder.and_(builder.icmp_signed(">=", token, low_words), builder.icmp_signed("<", token, high_words))
            loaded = load_wide(builder, score_data, after(start, i), lanes, types.float32)
            seen.append(is_seen)
            seen_scores.append(builder.select(is_seen, loaded, ir.Constant(vector, [_MINUS_INFINITY] * lanes)))
        top = _across(builder, _larger, seen_scores)
        grows = builder.fcmp_ordered(">", top, old)
        now = builder.select(grows, top, old)
        shrunk = _exp(builder, splat(builder, builder.fsub(old, now), vector))
        shrink = builder.select(grows, builder.extract_element(shrunk, ir.Constant(INT32, 0)), ir.Constant(FLOAT, 1.0))
        exponentials = []
        for is_seen, each in zip(seen, seen_scores, strict=True):
            weight = _exp(builder, builder.fsub(each, splat(builder, now, vector)))
            exponentials.append(builder.select(is_seen, weight, ir.Constant(vector, None)))
        for i, weight in zip(range(0, length, lanes), exponentials, strict=True):
            if signature.args[1].dtype == types.uint32:
                halves = builder.bitcast(weight_data, INT16.as_pointer())
                pointer = builder.bitcast(at(builder, halves, after(start, i)), ir.VectorType(INT16, lanes).as_pointer())
                builder.store(_to_bfloat(builder, weight), pointer).align = 2
            else:
                store(builder, weight_data, after(start, i), weight)
        total = _across(builder, lambda builder, a, b: builder.fadd(a, b), exponentials)
        place = at(builder, sum_data, row_index)
        builder.store(call(builder, "llvm.fma.f32", FLOAT, builder.load(place), shrink, total), place)
        builder.store(now, at(builder, highest_data, row_index))
        at_row, lanes = builder.mul(row_index, ir.Constant(row_index.type, size)), math.gcd(size, LANES)
        for d in range(0, size, lanes):
            value = load_wide(builder, weighted_data, after(at_row, d), lanes, types.float32)
            store(builder, weighted_data, after(at_row, d), builder.fmul(value, splat(builder, shrink, value.type)))
        return context.get_dummy_value()

    return types.none(scores, weights, row, low, high, highest, sums, weighted, width, head_dim), generate


def _larger(builder, a, b):
    """May overlook a NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _across(builder, combine, vectors):
    """All elements of all vectors combined, as a scalar."""
    result = functools.reduce(functools.partial(combine, builder), vectors)
    lanes = result.type.count
    while lanes > 1:
        lanes //= 2
        result = combine(builder, *(take(builder, result, range(begin, begin + lanes)) for begin in (0, lanes)))
    return builder.extract_element(result, ir.Constant(INT32, 0))


def _exp(builder, x):
    """e to the x, which is 0 at most; below _LOWEST as there. NaN stays NaN."""
    vector, count = x.type, x.type.count
    words = ir.VectorType(INT32, count)

    def constant(value):
        return ir.Constant(vector, [float(np.float32(value))] * count)

    lowest = constant(_LOWEST)
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    n = call(builder, f"llvm.rint.v{count}f32", vector, builder.fmul(x, constant(_LOG2_E)))
    r = multiply_add(builder, n, constant(-_LN2_HIGH), x)
    r = multiply_add(builder, n, constant(-_LN2_LOW), r)
    p = constant(_POLYNOMIAL[0])
    for coefficient in (*_POLYNOMIAL[1:], 1.0, 1.0):
        p = multiply_add(builder, p, r, constant(coefficient))
    exponent = builder.add(builder.fptosi(n, words), ir.Constant(words, [127] * count))
    return builder.fmul(p, builder.bitcast(builder.shl(exponent, ir.Constant(words, [23] * count)), vector))


def _to_bfloat(builder, x):
    """float32 as the bits of bfloat16, rounded to nearest, ties to even; NaN stays NaN."""
    words = ir.VectorType(INT32, x.type.count)

    def constant(value):
        return ir.Constant(words, [value] * x.type.count)

    bits = builder.bitcast(x, words)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.lshr(builder.add(builder.add(bits, constant(0x7FFF)), odd), constant(16))
    rounded = builder.select(builder.fcmp_unordered("uno", x, x), constant(0x7FC0), rounded)
    return builder.trunc(rounded, ir.VectorType(INT16, x.type.count))
