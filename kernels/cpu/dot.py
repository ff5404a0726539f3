"""Sums of four products of bytes into 32 bits, sixteen at a time, by the best instruction there is. All give the same integers."""

from __future__ import annotations

from llvmlite import ir

from kernels.cpu.ir import INT8, INT16, INT32, LANES, call, features, take

WORDS = ir.VectorType(INT32, LANES)
BYTES = ir.VectorType(INT8, 4 * LANES)
_HALF_PAIRS, _HALF_WORDS = ir.VectorType(INT16, 16), ir.VectorType(INT32, 8)


def dot_bytes(builder, total, unsigned, signed, bits):
    """total[i] + the sum over j < 4 of unsigned[4 * i + j] * signed[4 * i + j].

    `total` is of type WORDS, `unsigned` of BYTES, `signed` of WORDS, whose bytes are -127..127; `bits`: of the unsigned ones.
    """
    if "avx512vnni" in features():
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, total, builder.bitcast(unsigned, WORDS), signed)
    if "avx2" in features():
        return _dot_by_pairs(builder, total, unsigned, builder.bitcast(signed, BYTES), bits)
    return _dot_plainly(builder, total, unsigned, builder.bitcast(signed, BYTES))


def _dot_by_pairs(builder, total, unsigned, signed, bits):
    """AVX2 sums two products in 16 bits, which 15 * 127 * 2 fits and 255 * 127 * 2 does not: bytes of 8 bits go as two of 4."""
    nibble = ir.Constant(BYTES, [15] * BYTES.count)
    parts = [(unsigned, 1)]
    if bits == 8:
        high = builder.lshr(builder.bitcast(unsigned, WORDS), ir.Constant(WORDS, [4] * LANES))
        parts = [(builder.and_(unsigned, nibble), 1), (builder.and_(builder.bitcast(high, BYTES), nibble), 16)]
    sums = []
    for half in (range(0, 32), range(32, 64)):
        words = take(builder, total, range(half.start // 4, half.stop // 4))
        for codes, weight in parts:
            pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", _HALF_PAIRS, take(builder, codes, half), take(builder, signed, half))
            ones = ir.Constant(_HALF_PAIRS, [weight] * 16)
            words = builder.add(words, call(builder, "llvm.x86.avx2.pmadd.wd", _HALF_WORDS, pairs, ones))
        sums.append(words)
    mask = ir.Constant(ir.VectorType(INT32, LANES), list(range(LANES)))
    return builder.shuffle_vector(sums[0], sums[1], mask)


def _dot_plainly(builder, total, unsigned, signed):
    wide = ir.VectorType(INT32, BYTES.count)
    products = builder.mul(builder.zext(unsigned, wide), builder.sext(signed, wide))
    for j in range(4):
        total = builder.add(total, take(builder, products, range(j, BYTES.count, 4)))
    return total
