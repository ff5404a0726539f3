"""Top-k and top-p by their definitions and against their reference."""

import torch

from kernels import reference
from kernels.top_k_top_p import apply_top_k_top_p


def test_top_k_keeps_k_and_ties_with_the_kth():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]] * 3)
    apply_top_k_top_p(logits, torch.tensor([2, 1, 0], dtype=torch.int32), torch.ones(3))
    assert torch.isfinite(logits).tolist() == [[False, True, True, True, False], [False, True, False, False, False], [True] * 5]


def test_top_p_keeps_the_shortest_run_that_reaches_p():
    logits = torch.log(torch.tensor([[0.05, 0.5, 0.15, 0.3]])).repeat(5, 1)
    apply_top_k_top_p(logits, torch.zeros(5, dtype=torch.int32), torch.tensor([0.01, 0.49, 0.6, 0.81, 0.97]))
    assert torch.isfinite(logits).sum(1).tolist() == [1, 1, 2, 3, 4]


def test_top_p_among_equals_takes_lower_ids():
    logits = torch.zeros(1, 10)
    apply_top_k_top_p(logits, torch.zeros(1, dtype=torch.int32), torch.tensor([0.35]))
    assert torch.isfinite(logits)[0].tolist() == [True] * 4 + [False] * 6


def test_filters_equal_reference_on_many_rows():
    logits = torch.randn(60, 3001) * torch.linspace(0.1, 8, 60).unsqueeze(1)
    logits[::7, 1000:] = -torch.inf  # filtered before
    top_k = torch.tensor([0, 1, 5, 50, 500, 5000] * 10, dtype=torch.int32)
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.999, 0.05] * 12)
    expected = logits.clone()
    apply_top_k_top_p(logits, top_k, top_p)
    reference.apply_top_k_top_p(expected, top_k, top_p)
    assert torch.equal(logits, expected)
