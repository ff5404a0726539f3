"""Penalties have the bits of the CPU's kernel: repeated tokens, tokens of prompt and output both, neutral rows."""

import torch

from kernels import penalties as cpu
from kernels.triton import penalties
from kernels.triton.penalties import apply_penalties


def test_penalties_have_the_bits_of_the_cpu(device, monkeypatch):
    monkeypatch.setattr(penalties, "BLOCK", 16)
    logits = torch.randn(5, 103)
    logits[0, 50:] = -torch.inf
    token_ids = torch.randint(0, 103, (8, 60), dtype=torch.int32)
    token_ids[7, 5:40] = 3  # many times in one program and in several
    numbers = [torch.tensor(x, dtype=torch.int32) for x in ([7, 0, 3, 4, 5], [10, 20, 1, 0, 30], [60, 20, 40, 0, 31])]
    strengths = [torch.tensor(x) for x in ([0.5, 0, -1, 2, 0], [0.1, 0, 2, 1, 0], [1.2, 1, 0.7, 1.0, 1.5])]
    arguments = [token_ids, *numbers, *strengths]
    expected = logits.clone()
    cpu.apply_penalties(expected, *arguments)
    assert not torch.equal(logits, expected)
    changed = logits.to(device)
    apply_penalties(changed, *(x.to(device) for x in arguments))
    assert torch.equal(changed.cpu(), expected)


def test_no_tokens(device):
    logits = torch.ones(1, 5, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    apply_penalties(logits, zero.reshape(1, 1), zero, zero, zero, *(torch.full((1,), 2.0, device=device) for _ in range(3)))
    assert torch.equal(logits, torch.ones(1, 5, device=device))
