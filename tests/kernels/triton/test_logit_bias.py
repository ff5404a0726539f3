"""Biases of single tokens."""

import torch

from kernels import reference
from kernels.triton import logit_bias
from kernels.triton.logit_bias import add_logit_bias


def test_add_logit_bias_equals_reference(device, monkeypatch):
    monkeypatch.setattr(logit_bias, "BLOCK", 16)
    logits = torch.randn(5, 103, device=device)[:, :101]
    logits[2, 7] = -torch.inf
    expected = logits.clone()
    pairs = torch.randperm(5 * 101, device=device)[:37]
    rows, token_ids, biases = pairs // 101, pairs % 101, torch.randn(37, device=device) * 100
    add_logit_bias(logits, rows, token_ids, biases)
    reference.add_logit_bias(expected, rows, token_ids, biases)
    assert torch.equal(logits, expected)
