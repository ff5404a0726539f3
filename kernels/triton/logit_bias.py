"""Biases of single tokens on a GPU, all rows in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.variant import Variant

BLOCK = 256  # biases a program


def add_logit_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, biases: torch.Tensor) -> None:
    """As `kernels.logit_bias.add_logit_bias`."""
    count = rows.shape[0]
    if count == 0:
        return
    _add_logit_bias_kernel[(triton.cdiv(count, BLOCK),)](
        logits, rows, token_ids, biases, count, logits.stride(0), BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False
    )


@triton.jit(do_not_specialize=["count"])
def _add_logit_bias_kernel(logits, rows, token_ids, biases, count, logits_row, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = i < count
    place = logits + tl.load(rows + i, mask=known, other=0) * logits_row + tl.load(token_ids + i, mask=known, other=0)
    logit = tl.load(place, mask=known, other=0.0)
    tl.store(place, logit + tl.load(biases + i, mask=known, other=0.0), mask=known)


def _example() -> None:
    integers = torch.empty(300, dtype=torch.int64, device="meta")
    add_logit_bias(torch.empty(64, 128256, device="meta"), integers, integers, torch.empty(300, device="meta"))


AOT_VARIANTS = [Variant("vocabulary of 128256", _example)]
