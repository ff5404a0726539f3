"""Masks of grammars, whose words are numbers with a sign."""

import torch

from kernels import reference
from kernels.token_mask import apply_token_mask


def test_what_is_not_allowed_goes():
    logits = torch.arange(3 * 40, dtype=torch.float32).reshape(3, 40)
    expected = logits.clone()
    masks = torch.tensor([[1 << 3 | -(2**31), 1], [-1, 0]], dtype=torch.int32)
    apply_token_mask(logits, torch.tensor([2, 0]), masks)
    assert torch.isfinite(logits[2]).nonzero()[:, 0].tolist() == [3, 31, 32]
    assert torch.isfinite(logits[0]).nonzero()[:, 0].tolist() == list(range(32))
    assert torch.equal(logits[1], expected[1])
    assert torch.equal(logits[2, [3, 31, 32]], expected[2, [3, 31, 32]])


def test_masks_equal_reference():
    torch.manual_seed(1)
    logits = torch.randn(5, 1003)
    expected = logits.clone()
    rows = torch.tensor([4, 0, 2])
    masks = torch.randint(-(2**31), 2**31, (3, 32)).int()
    masks[1, :7] = -1
    apply_token_mask(logits, rows, masks)
    reference.apply_token_mask(expected, rows, masks)
    assert torch.equal(logits, expected)
