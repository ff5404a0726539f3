"""The gate of a SwiGLU MLP (Shazeer 2020, arXiv 2002.05202): silu(gate) * up."""

from __future__ import annotations

import torch

from kernels import device, reference
from kernels.cpu.silu_mul import gate


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [num_tokens, 2 * intermediate] holds the gate, then up; returns [num_tokens, intermediate]."""
    if device.on_accelerator(gate_up):
        return device.accelerated("silu_mul", "silu_mul")(gate_up)
    if gate_up.dtype != torch.float32:
        return reference.silu_mul(gate_up)
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    gate(out.numpy(), gate_up.numpy())
    return out
