"""The min-p filter keeps what its twin keeps."""

import torch

from kernels import reference
from kernels.triton import min_p
from kernels.triton.min_p import apply_min_p


def test_min_p_equals_reference(device, monkeypatch):
    monkeypatch.setattr(min_p, "BLOCK", 512)
    logits = torch.randn(5, 1003, device=device) * 3
    logits[1, 500:] = -torch.inf
    expected = logits.clone()
    shares = torch.tensor([0.0, 0.3, 0.02, 1.0, 1e-6], device=device)
    apply_min_p(logits, shares)
    reference.apply_min_p(expected, shares)
    assert torch.equal(logits, expected)
    assert torch.isfinite(logits).sum(1).tolist()[3] == 1
