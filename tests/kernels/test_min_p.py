"""The min-p filter by its definition."""

import torch

from kernels.min_p import apply_min_p


def test_min_p_keeps_what_is_likely_enough():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.5, 0.3, 0.15, 0.05]]))
    apply_min_p(logits, torch.tensor([0.31, 0.0]))
    assert torch.isfinite(logits).tolist() == [[True, True, False, False], [True] * 4]
