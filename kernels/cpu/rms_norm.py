"""The loops of `rms_norm` on the CPU."""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiled import compiled


# Reassociation lets the sum of squares run in vector lanes; the order depends on the row's length alone.
@compiled(fastmath={"reassoc", "contract", "nsz"})
def normalize(out, x, weight, epsilon):
    hidden = x.shape[1]
    for row in range(x.shape[0]):
        squares = np.float32(0.0)
        for i in range(hidden):
            squares += x[row, i] * x[row, i]
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(hidden) + epsilon)
        for i in range(hidden):
            out[row, i] = weight[i] * (x[row, i] * scale)


@compiled(fastmath={"reassoc", "contract", "nsz"})
def add_normalize(out, x, residual, weight, epsilon):
    """`add_rms_norm` of float32 arrays, the norm into `out`."""
    hidden = x.shape[1]
    for row in range(x.shape[0]):
        squares = np.float32(0.0)
        for i in range(hidden):
            sum_now = residual[row, i] + x[row, i]
            residual[row, i] = sum_now
            squares += sum_now * sum_now
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(hidden) + epsilon)
        for i in range(hidden):
            out[row, i] = weight[i] * (residual[row, i] * scale)
