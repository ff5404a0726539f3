"""Mixture of experts by its definition, a token and a choice at a time."""

import torch
import torch.nn.functional as F

from kernels.moe import fused_experts


def test_fused_experts_is_the_weighted_sum_of_each_tokens_experts():
    x = torch.randn(5, 12)
    gate_up, down = torch.randn(4, 14, 12), torch.randn(4, 12, 7)
    experts = torch.tensor([[0, 2], [2, 0], [3, 2], [0, 3], [2, 3]])  # nobody's: 1
    weights = torch.rand(5, 2)
    expected = torch.zeros(5, 12)
    for token in range(5):
        for choice in range(2):
            expert = experts[token, choice]
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected[token] += weights[token, choice] * (down[expert] @ (F.silu(gate) * up))
    torch.testing.assert_close(fused_experts(x, gate_up, down, experts, weights), expected)
