"""Mixture of experts: each token's gated feed-forward network is the weighted sum of a few out of many (Shazeer et al. 2017,
arXiv 1701.06538; Mixtral, Jiang et al. 2024, arXiv 2401.04088).

No model calls it yet: it is for the mixture-of-experts families to come (Mixtral, Qwen3-MoE).
"""

from __future__ import annotations

import torch

from kernels import device, reference


def fused_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """sum over i of weights[:, i] * (silu(x @ gate.T) * (x @ up.T)) @ down.T of expert experts[:, i].

    x        [num_tokens, hidden]
    gate_up  [num_experts, 2 * intermediate, hidden] of x's dtype, the gate's rows first
    down     [num_experts, hidden, intermediate] of x's dtype
    experts  [num_tokens, top_k] integers in 0..num_experts-1
    weights  [num_tokens, top_k] float32
    Returns [num_tokens, hidden] of x's dtype. Sums are float32; what goes from one product to the next has x's dtype.
    """
    if device.on_accelerator(x):
        return device.accelerated("moe", "fused_experts")(x, gate_up, down, experts, weights)
    return reference.fused_experts(x, gate_up, down, experts, weights)
