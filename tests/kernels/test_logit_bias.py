"""Biases of single tokens by a worked example."""

import torch

from kernels.logit_bias import add_logit_bias


def test_add_logit_bias_worked_example():
    logits = torch.zeros(2, 3)
    add_logit_bias(logits, torch.tensor([0, 0, 1]), torch.tensor([2, 0, 2]), torch.tensor([1.0, -2.0, 0.5]))
    assert logits.tolist() == [[-2.0, 0.0, 1.0], [0.0, 0.0, 0.5]]
