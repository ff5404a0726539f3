"""Penalties by a worked example and against their reference."""

import torch

from kernels import reference
from kernels.penalties import apply_penalties


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
    logits = torch.randn(5, 100)
    token_ids = torch.randint(0, 100, (8, 60), dtype=torch.int32)
    numbers = [torch.tensor(x, dtype=torch.int32) for x in ([7, 0, 3, 4, 5], [10, 20, 1, 0, 30], [60, 20, 40, 0, 31])]
    strengths = [torch.tensor(x) for x in ([0.5, 0, -1, 2, 0], [0.1, 0, 2, 1, 0], [1.2, 1, 0.7, 1.0, 1.5])]
    expected = logits.clone()
    apply_penalties(logits, token_ids, *numbers, *strengths)
    reference.apply_penalties(expected, token_ids, *numbers, *strengths)
    torch.testing.assert_close(logits, expected)
