"""Log probabilities of chosen tokens, and how likely a token is among all."""

from __future__ import annotations

import torch

from kernels import device, reference


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [num_rows, vocab] float32, token_ids [num_rows, k] int64, k at least 1: (log_softmax(logits) of those tokens
    [num_rows, k] float32, ranks of the first of each row [num_rows] int32: 1 plus the number of tokens with a higher logit)."""
    if device.on_accelerator(logits):
        return device.accelerated("logprobs", "gather_logprobs")(logits, token_ids)
    return reference.gather_logprobs(logits, token_ids)
