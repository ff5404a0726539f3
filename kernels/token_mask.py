"""Leaves a row only the tokens that its grammar allows next."""

from __future__ import annotations

import torch

from kernels import device
from kernels.cpu.token_mask import keep_allowed


def apply_token_mask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Sets logits[rows[i], t] to -inf, in place, where bit t of masks[i] is 0. Token t is bit t % 32 of word t // 32.

    logits [num_rows, vocab] float32; rows [n] int64, no row twice; masks [n, ceil(vocab / 32)] int32
    """
    if device.on_accelerator(logits):
        device.accelerated("token_mask", "apply_token_mask")(logits, rows, masks)
        return
    keep_allowed(logits.numpy(), rows.numpy(), masks.numpy())
