"""Top-k and top-p keep what a stable sort keeps, ties included."""

import pytest
import torch

from kernels import reference
from kernels.triton import top_k_top_p
from kernels.triton.top_k_top_p import apply_top_k_top_p


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(top_k_top_p, "BLOCK", 256)


def both(logits, top_k, top_p):
    top_k = torch.tensor(top_k, dtype=torch.int32, device=logits.device)
    top_p = torch.tensor(top_p, device=logits.device)
    expected = logits.clone()
    apply_top_k_top_p(logits, top_k, top_p)
    reference.apply_top_k_top_p(expected, top_k, top_p)
    return logits, expected


def test_equals_reference(device):
    """Few and many kept, k above the number of lanes and above the vocabulary, filters alone and together, rows filtered before."""
    logits = torch.randn(8, 503, device=device) * torch.linspace(0.1, 8, 8, device=device).unsqueeze(1)
    logits[::5, 300:] = -torch.inf
    filtered, expected = both(logits, [0, 1, 5, 50, 300, 5000, 0, 20], [0.7, 0.9, 0.5, 1.0, 0.999, 0.3, 0.95, 0.01])
    assert torch.equal(filtered, expected)
    assert len(set(torch.isfinite(filtered).sum(1).tolist())) > 5


def test_ties(device, monkeypatch):
    monkeypatch.setattr(top_k_top_p, "BLOCK", 128)  # three tiles
    logits = torch.randint(-3, 4, (6, 280), device=device).float()
    logits[3] = 0.0
    logits[4] = -0.0
    logits[4, ::2] = 0.0
    filtered, expected = both(logits, [0, 0, 30, 0, 0, 200], [0.9, 0.3, 0.5, 0.95, 0.35, 0.99])
    assert torch.equal(filtered, expected)


def test_top_p_of_zero_keeps_the_first_of_the_highest_and_rows_without_candidates_stay(device):
    logits = torch.zeros(3, 300, device=device)
    logits[0, [17, 290]] = 5.0
    logits[2] = -torch.inf
    filtered, _ = both(logits, [0, 3, 3], [0.0, 0.0, 0.5])
    assert torch.isfinite(filtered[0]).nonzero().tolist() == [[17]]
    assert torch.isfinite(filtered[1]).nonzero().tolist() == [[0]]
    assert torch.isneginf(filtered[2]).all()


def test_strided_rows_and_extreme_logits(device):
    wide = torch.zeros(2, 400, device=device)
    logits = wide[:, :333]
    logits.copy_(torch.randn(2, 333, device=device) * 1e30)
    filtered, expected = both(logits, [7, 0], [1.0, 0.5])
    assert torch.equal(filtered, expected) and not wide[:, 333:].any()
