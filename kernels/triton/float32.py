"""float32 exp and log for kernels whose results must have the CPU's bits: `kernels.cpu.math`, operation by operation.

Only correctly rounded operations; the launches set `enable_fp_fusion=False`, so that none of them are contracted.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp_float32(x):
    """e to the x, x clamped to [-87, 88]."""
    x = tl.minimum(tl.maximum(x, -87.0), 88.0)
    n = tl.floor(x * 1.44269504088896341 + 0.5)
    r = x - n * 0.693359375
    r = r - n * -2.12194440e-4
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = p * r * r + r + 1.0
    return p * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def log_float32(x):
    """Natural logarithm of a positive normal number."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) - 126).to(tl.float32)
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)  # [0.5, 1)
    low = mantissa < 0.707106781186547524
    e = tl.where(low, exponent - 1.0, exponent)
    f = tl.where(low, mantissa + mantissa, mantissa) - 1.0
    z = f * f
    p = 7.0376836292e-2 * f + -1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f + -1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f + -1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f + -2.4999993993e-1
    p = p * f + 3.3333331174e-1
    y = p * f * z
    y = y + e * -2.12194440e-4
    y = y - z * 0.5
    return (f + y) + e * 0.693359375
