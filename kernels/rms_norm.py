"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467), alone or after adding a residual."""

from __future__ import annotations

import numpy as np
import torch

from kernels import device, reference
from kernels.cpu.rms_norm import add_normalize, normalize


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x**2) + epsilon) * weight over the last dimension; statistics in float32, the product in x's dtype.

    x [..., hidden], weight [hidden]; returns a new tensor of x's shape.
    """
    if device.on_accelerator(x):
        return device.accelerated("rms_norm", "rms_norm")(x, weight, epsilon)
    if x.dtype != torch.float32:
        return reference.rms_norm(x, weight, epsilon)
    x = x.contiguous()
    out = torch.empty_like(x)
    hidden = x.shape[-1]
    normalize(out.view(-1, hidden).numpy(), x.view(-1, hidden).numpy(), weight.numpy(), np.float32(epsilon))
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """residual += x, in place; returns rms_norm(residual). x, residual [num_tokens, hidden], contiguous."""
    if device.on_accelerator(x):
        return device.accelerated("rms_norm", "add_rms_norm")(x, residual, weight, epsilon)
    if x.dtype != torch.float32:
        return reference.add_rms_norm(x, residual, weight, epsilon)
    out = torch.empty_like(x)
    add_normalize(out.numpy(), x.numpy(), residual.numpy(), weight.numpy(), np.float32(epsilon))
    return out
