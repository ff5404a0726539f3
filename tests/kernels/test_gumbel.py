"""Noise and draws: known answers, statistics, and the same bits as the reference."""

import numpy as np
import torch

from kernels import reference
from kernels.cpu.gumbel import MAX_NOISE
from kernels.gumbel import gumbel_argmax, gumbel_noise


def test_noise_is_philox():
    """Known answer of Philox 4x32-10 for key and counter of zeros (Random123's kat_vectors), through our transforms."""
    words = np.array([0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8], np.uint64)
    uniform = ((words >> np.uint64(9)) + 0.5) * 2.0**-23
    np.testing.assert_allclose(gumbel_noise(0, 0, 4).numpy(), -np.log(-np.log(uniform)), rtol=1e-6)


def test_noise_is_the_same_bits_as_the_reference_and_within_its_bound():
    token_ids = torch.arange(20_000)
    for seed, position in [(0, 0), (1, 5), (-1, 131071), (2**63 - 1, 2**33), (123456789012345, 77)]:
        noise = gumbel_noise(seed, position, 20_000)
        assert torch.equal(noise, reference.gumbel_noise(seed, position, token_ids))
        assert noise.max() <= float(MAX_NOISE) and noise.min() >= -2.82


def test_noise_has_gumbel_moments_and_no_visible_correlation():
    noise = torch.stack([gumbel_noise(3, position, 50_000) for position in range(8)]).double()
    assert abs(noise.mean() - 0.5772) < 0.01 and abs(noise.var() - np.pi**2 / 6) < 0.02
    correlation = torch.corrcoef(torch.cat([noise, noise.roll(1, 1)]))
    assert (correlation - torch.eye(16)).abs().max() < 0.02


def test_draws_equal_reference_with_filters_and_odd_vocabulary():
    logits = torch.randn(40, 1003) * torch.linspace(0.05, 10, 40).unsqueeze(1)
    logits[1::2] = logits[1::2].masked_fill(torch.rand(20, 1003) < 0.95, -torch.inf)
    greedy = torch.arange(40) % 5 == 0
    seeds = torch.randint(-(2**62), 2**62, (40,))
    positions = torch.arange(40) * 1000
    drawn = gumbel_argmax(logits, greedy, seeds, positions)
    assert torch.equal(drawn, reference.gumbel_argmax(logits, greedy, seeds, positions))
    assert torch.equal(drawn[greedy], logits[greedy].argmax(1))
    assert torch.isfinite(logits.gather(1, drawn.unsqueeze(1))).all()
    alone = torch.cat(
        [gumbel_argmax(logits[i : i + 1], greedy[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) for i in range(40)]
    )
    assert torch.equal(drawn, alone)


def test_draws_follow_softmax():
    """Chi-squared over 20,000 positions of one seed; the limit is the 0.9999 quantile at 4 degrees of freedom."""
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    count = 20_000
    logits = torch.log(probabilities).repeat(count, 1)
    drawn = gumbel_argmax(logits, torch.zeros(count, dtype=torch.bool), torch.full((count,), 42), torch.arange(count))
    observed = torch.bincount(drawn, minlength=5)
    expected = probabilities * count
    assert ((observed - expected).square() / expected).sum() < 23.5
