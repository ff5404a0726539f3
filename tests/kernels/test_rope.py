"""Rotary embedding against its reference."""

import torch

from kernels import reference
from kernels.rope import rope


def test_rope_turns_a_slice_in_place():
    fused = torch.randn(4, 5 * 16)
    before = fused.clone()
    cos_sin = torch.randn(50, 16)
    positions = torch.tensor([0, 49, 3, 3])
    rope(fused[:, 16:64].view(4, 3, 16), positions, cos_sin)
    expected = before[:, 16:64].clone().view(4, 3, 16)
    reference.rope(expected, positions, cos_sin)
    torch.testing.assert_close(fused[:, 16:64].reshape(4, 3, 16), expected)
    assert torch.equal(fused[:, :16], before[:, :16]) and torch.equal(fused[:, 64:], before[:, 64:])
