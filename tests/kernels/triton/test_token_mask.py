"""Masks over several programs a row, on a vocabulary that is no multiple of anything."""

import torch

from kernels import reference
from kernels.triton import token_mask
from kernels.triton.token_mask import apply_token_mask


def test_masks_equal_reference(device, monkeypatch):
    monkeypatch.setattr(token_mask, "BLOCK", 64)
    logits = torch.randn(4, 203)
    rows = torch.tensor([3, 0])
    masks = torch.randint(-(2**31), 2**31, (2, 7)).int()
    expected = logits.clone()
    reference.apply_token_mask(expected, rows, masks)
    changed = logits.to(device)
    apply_token_mask(changed, rows.to(device), masks.to(device))
    assert torch.equal(changed.cpu(), expected)
