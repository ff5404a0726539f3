"""Adds what requests asked to be added to logits of single tokens (`logit_bias`)."""

from __future__ import annotations

import torch

from kernels import device, reference


def add_logit_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, biases: torch.Tensor) -> None:
    """logits[rows[i], token_ids[i]] += biases[i], in place; no pair twice.

    logits [num_rows, vocab] float32; rows, token_ids [n] int64; biases [n] float32
    """
    if device.on_accelerator(logits):
        device.accelerated("logit_bias", "add_logit_bias")(logits, rows, token_ids, biases)
        return
    reference.add_logit_bias(logits, rows, token_ids, biases)
