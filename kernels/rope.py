"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), two halves: dimension i turns with i + head_dim / 2."""

from __future__ import annotations

import torch

from kernels import device, reference
from kernels.cpu.rope import rotate


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
