"""float32 exp and log, and 16-bit numbers in and out of bits, written so that LLVM vectorises loops over them.

`math.exp` inside a numba loop is a scalar library call (about 6 ns an element here); these are a dozen multiplications and
additions. Polynomials: Cephes `expf` and `logf` (https://www.netlib.org/cephes/), errors below 2 ulp on the ranges in use. Only
correctly rounded operations, so that a kernel compiled without contraction gives the same bits on every machine.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from kernels.cpu.compiled import compiled

_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_LOWEST = np.float32(-87.0)  # exp of it, 1.6e-38, is still a normal number; what is lower gives the same
_HIGHEST = np.float32(88.0)
_SQRT_HALF = np.float32(0.707106781186547524)


@compiled(fastmath={"contract"})
def exp_float32(x):
    """e to the x, x clamped to [-87, 88]; NaN stays NaN."""
    x = min(max(x, _LOWEST), _HIGHEST) if x == x else x
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + _ONE
    scale = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * scale


@compiled()
def log_float32(x):
    """Natural logarithm of a positive normal float32; `reference.log_float32` does the same operations in the same order."""
    bits = np.float32(x).view(np.int32)
    exponent = np.int32((bits >> np.int32(23)) - np.int32(126))
    mantissa = np.int32((bits & np.int32(0x007FFFFF)) | np.int32(0x3F000000)).view(np.float32)  # [0.5, 1)
    low = mantissa < _SQRT_HALF
    e = np.float32(exponent) - (_ONE if low else np.float32(0.0))
    f = (mantissa + mantissa if low else mantissa) - _ONE
    z = f * f
    p = np.float32(7.0376836292e-2) * f + np.float32(-1.1514610310e-1)
    p = p * f + np.float32(1.1676998740e-1)
    p = p * f + np.float32(-1.2420140846e-1)
    p = p * f + np.float32(1.4249322787e-1)
    p = p * f + np.float32(-1.6668057665e-1)
    p = p * f + np.float32(2.0000714765e-1)
    p = p * f + np.float32(-2.4999993993e-1)
    p = p * f + np.float32(3.3333331174e-1)
    y = p * f * z
    y = y + e * _LN2_LOW
    y = y - z * _HALF
    return (f + y) + e * _LN2_HIGH


def elements(x: torch.Tensor) -> np.ndarray:
    """The tensor's memory as compiled code takes it: bfloat16 as uint16, float16 as int16, other types as they are."""
    bits = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}.get(x.dtype, x.dtype)
    return x.view(bits).numpy()


def widen(x):
    """An element of `elements` as float32."""
    raise NotImplementedError("for compiled code only")


@overload(widen)
def _widen(x):
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    if x == types.int16:
        return lambda x: _half_to_float(x)
    return lambda x: x


def narrow(x, stored):
    """float32 x as an element of `stored`'s kind, rounded to nearest, ties to even; or x of that kind as it is."""
    raise NotImplementedError("for compiled code only")


@overload(narrow)
def _narrow(x, stored):
    if x == stored:
        return lambda x, stored: x
    if stored == types.uint16:
        return lambda x, stored: _bfloat16_bits(x)
    if stored == types.int16:
        return lambda x, stored: _float_to_half(x)
    return None


@numba.njit(inline="always")
def _bfloat16_bits(x):
    bits = np.float32(x).view(np.uint32)
    if x != x:
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


# numba has no float16 on CPUs; LLVM has, and makes one instruction (F16C) of eight conversions.
@intrinsic
def _half_to_float(typing_context, bits):
    def generate(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), generate


@intrinsic
def _float_to_half(typing_context, x):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), generate
