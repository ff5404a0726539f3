"""The loop of `silu_mul` on the CPU."""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiled import compiled
from kernels.cpu.math import exp_float32


@compiled(fastmath={"contract"})
def gate(out, gate_up):
    """out [tokens, intermediate] of gate_up, both float32."""
    intermediate = out.shape[1]
    for token in range(out.shape[0]):
        gates = gate_up[token, :intermediate]
        ups = gate_up[token, intermediate:]
        for i in range(intermediate):
            out[token, i] = gates[i] / (np.float32(1.0) + exp_float32(-gates[i])) * ups[i]
