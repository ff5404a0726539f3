"""Min-p filter (Nguyen et al. 2024, arXiv 2407.01082): drops tokens less likely than a share of the likeliest one."""

from __future__ import annotations

import torch

from kernels import device, reference


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """Sets to -inf, in place, each logit below the row's highest + log(min_p).

    logits [num_rows, vocab] float32, min_p [num_rows] float32 in [0, 1]; 0 leaves a row as it is.
    """
    if device.on_accelerator(logits):
        device.accelerated("min_p", "apply_min_p")(logits, min_p)
        return
    reference.apply_min_p(logits, min_p)
