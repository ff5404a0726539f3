"""The loop of `rope` on the CPU."""

from __future__ import annotations

from kernels.cpu.compiled import compiled


@compiled()
def rotate(x, num_heads, positions, cos_sin):
    """`rope` of the first `num_heads` heads of float32 x."""
    half = x.shape[2] // 2
    for token in range(x.shape[0]):
        angles = cos_sin[positions[token]]
        for head in range(num_heads):
            for i in range(half):
                a, b = x[token, head, i], x[token, head, i + half]
                x[token, head, i] = a * angles[i] - b * angles[i + half]
                x[token, head, i + half] = b * angles[i] + a * angles[i + half]
