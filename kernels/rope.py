"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), two halves: dimension i turns with i + head_dim / 2."""

from __future__ import annotations

import numba
import torch

from kernels import device, reference


def rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Turns x in place.

    x         [num_tokens, num_heads, head_dim], last dimension contiguous (a slice of the fused projection is fine)
    positions [num_tokens] int64
    cos_sin   [num_positions, head_dim] float32: cosines of the head_dim / 2 angles, then their sines
    """
    if device.on_accelerator(x):
        device.accelerated("rope", "rope")(x, positions, cos_sin)
        return
    if x.dtype != torch.float32:
        reference.rope(x, positions, cos_sin)
        return
    rotate(x.numpy(), x.shape[1], positions.numpy(), cos_sin.numpy())


@numba.njit(cache=True, nogil=True)
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
