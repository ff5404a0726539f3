"""Noise has the CPU's bits; draws are the reference's, blocks and rows put together in any order."""

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.triton import gumbel
from kernels.triton.gumbel import gumbel_argmax, gumbel_noise


@triton.jit
def _noise_kernel(out, seeds, positions, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    noise = gumbel_noise(tl.load(seeds), tl.load(positions), first, BLOCK)
    tl.store(out + first + tl.arange(0, BLOCK), noise)


def test_noise_has_the_bits_of_the_reference(device):
    token_ids = torch.arange(4096, device=device)
    for seed, position in [(0, 0), (1, 5), (-1, 131071), (2**63 - 1, 2**33), (-(2**63), 77)]:
        noise = torch.empty(4096, device=device)
        arguments = (torch.tensor([x], device=device) for x in (seed, position))
        _noise_kernel[(2,)](noise, *arguments, BLOCK=2048, enable_fp_fusion=False)
        assert torch.equal(noise, reference.gumbel_noise(seed, position, token_ids))


def test_draws_equal_reference_with_filters_greedy_rows_and_odd_vocabulary(device, monkeypatch):
    monkeypatch.setattr(gumbel, "BLOCK", 256)
    logits = torch.randn(9, 1003, device=device) * torch.linspace(0.05, 10, 9, device=device).unsqueeze(1)
    logits[1::2] = logits[1::2].masked_fill(torch.rand(4, 1003, device=device) < 0.95, -torch.inf)
    logits[4] = -torch.inf
    greedy = torch.arange(9, device=device) % 4 == 0
    seeds = torch.randint(-(2**62), 2**62, (9,), device=device)
    positions = torch.arange(9, device=device) * 1000
    drawn = gumbel_argmax(logits, greedy, seeds, positions)
    assert torch.equal(drawn, reference.gumbel_argmax(logits, greedy, seeds, positions))
    assert drawn.dtype == torch.int64 and drawn[4] == 0
    wide = torch.zeros(9, 1100, device=device)
    wide[:, :1003] = logits
    assert torch.equal(gumbel_argmax(wide[:, :1003], greedy, seeds, positions), drawn)


def test_the_lowest_of_equals_wins_across_blocks(device, monkeypatch):
    monkeypatch.setattr(gumbel, "BLOCK", 16)
    logits = torch.zeros(1, 50, device=device)
    logits[0, [37, 20, 41]] = 3.0
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    assert gumbel_argmax(logits, torch.ones(1, dtype=torch.bool, device=device), zero, zero).item() == 20
