"""Sums of products of two bfloat16 each, sixteen at a time: a word of 32 bits holds a pair, the first in its lower half.

The sum is the same whatever the processor has: the pair's second product is added first, each in one rounding. Only what is smaller
than the least normal float32 differs: the instruction for it (AVX512_BF16) takes it for zero.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir

from kernels.cpu.ir import BFLOAT, INT16, INT32, LANES, at, call, features, load_as, multiply_add
from kernels.cpu.math import narrow

PAIR = 2
_KIND = np.uint16(0)  # tells `narrow` to make bfloat16


def is_fast() -> bool:
    """Whether the processor multiplies pairs of bfloat16."""
    return "avx512bf16" in features()


def add_products(builder, total, x, y):
    """total[i] + the sum of the products of x[i]'s pair with y[i]'s; total a vector of float32, x and y of words."""
    if is_fast() and total.type.count == LANES:
        pairs = ir.VectorType(BFLOAT, PAIR * LANES)
        return call(
            builder, "llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, *(builder.bitcast(each, pairs) for each in (x, y))
        )
    count = total.type.count
    upper, shift = (ir.Constant(x.type, [value] * count) for value in (-(1 << 16), 16))
    for part in ([builder.and_(each, upper) for each in (x, y)], [builder.shl(each, shift) for each in (x, y)]):
        total = multiply_add(builder, *(builder.bitcast(each, total.type) for each in part), total)
    return total


def load_pairs(builder, data, first, second, lanes):
    """Words of the elements at first..first+lanes-1 and second..second+lanes-1 of a bfloat16 array."""
    words = ir.VectorType(INT32, lanes)
    lower, upper = (
        builder.zext(load_as(builder, at(builder, data, place), ir.VectorType(INT16, lanes), 2), words) for place in (first, second)
    )
    return builder.or_(lower, builder.shl(upper, ir.Constant(words, [16] * lanes)))


@numba.njit(inline="always")
def pair(first, second):
    """Two float32, rounded to bfloat16, as a word."""
    return np.uint32(narrow(first, _KIND)) | np.uint32(narrow(second, _KIND)) << np.uint32(16)
