"""penalties, min_p, top_k_top_p and gumbel against their references and their definitions."""

import numpy as np
import torch

from kernels import reference
from kernels.gumbel import MAX_NOISE, gumbel_argmax, gumbel_noise
from kernels.min_p import apply_min_p
from kernels.penalties import apply_penalties
from kernels.top_k_top_p import apply_top_k_top_p


def test_penalties_worked_example():
    logits = torch.tensor([[2.0, -2.0, 1.0, 4.0]])
    token_ids = torch.tensor([[9, 9, 9, 9, 9], [0, 1, 3, 3, 2]], dtype=torch.int32)
    one = torch.ones(1)
    arguments = [
        token_ids,
        *(torch.tensor([x], dtype=torch.int32) for x in (1, 2, 4)),
    ]  # prompt 0 1, output 3 3; the 2 is not known yet
    apply_penalties(logits, *arguments, 0.5 * one, 0.25 * one, 2 * one)
    torch.testing.assert_close(logits, torch.tensor([[1.0, -4.0, 1.0, 2.0 - 2 * 0.25 - 0.5]]))


def test_penalties_equal_reference():
    torch.manual_seed(1)
    logits = torch.randn(5, 100)
    token_ids = torch.randint(0, 100, (8, 60), dtype=torch.int32)
    numbers = [torch.tensor(x, dtype=torch.int32) for x in ([7, 0, 3, 4, 5], [10, 20, 1, 0, 30], [60, 20, 40, 0, 31])]
    strengths = [torch.tensor(x) for x in ([0.5, 0, -1, 2, 0], [0.1, 0, 2, 1, 0], [1.2, 1, 0.7, 1.0, 1.5])]
    expected = logits.clone()
    apply_penalties(logits, token_ids, *numbers, *strengths)
    reference.apply_penalties(expected, token_ids, *numbers, *strengths)
    torch.testing.assert_close(logits, expected)


def test_min_p_keeps_what_is_likely_enough():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.5, 0.3, 0.15, 0.05]]))
    apply_min_p(logits, torch.tensor([0.31, 0.0]))
    assert torch.isfinite(logits).tolist() == [[True, True, False, False], [True] * 4]


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
    torch.manual_seed(2)
    logits = torch.randn(60, 3001) * torch.linspace(0.1, 8, 60).unsqueeze(1)
    logits[::7, 1000:] = -torch.inf  # filtered before
    top_k = torch.tensor([0, 1, 5, 50, 500, 5000] * 10, dtype=torch.int32)
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.999, 0.05] * 12)
    expected = logits.clone()
    apply_top_k_top_p(logits, top_k, top_p)
    reference.apply_top_k_top_p(expected, top_k, top_p)
    assert torch.equal(logits, expected)


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
    torch.manual_seed(3)
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
