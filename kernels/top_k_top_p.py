"""Top-k and nucleus (top-p; Holtzman et al. 2019, arXiv 1904.09751) filters on logits."""

from __future__ import annotations

import torch

from kernels import device
from kernels.cpu.top_k_top_p import filter_rows


def apply_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    """Sets filtered logits to -inf, in place: first top-k, then top-p among what is left.

    Top-k keeps the k highest and what ties with the k-th. Top-p keeps the shortest run of tokens, likeliest first (of equals, lower
    ids first), whose probabilities reach top_p; at least one.

    logits [num_rows, vocab] float32, top_k [num_rows] int32 (0: off), top_p [num_rows] float32 (1: off)
    """
    if device.on_accelerator(logits):
        device.accelerated("top_k_top_p", "apply_top_k_top_p")(logits, top_k, top_p)
        return
    filter_rows(logits.numpy(), top_k.numpy(), top_p.numpy())
