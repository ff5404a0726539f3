"""Min-p filter on a GPU: a program a row, which reads the row for its maximum and once more, out of the cache, to filter it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.variant import Variant

BLOCK = 4096  # tokens a step


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """As `kernels.min_p.apply_min_p`."""
    if logits.shape[0] == 0:
        return
    _min_p_kernel[(logits.shape[0],)](
        logits,
        torch.log(min_p),
        logits.shape[1],
        logits.stride(0),
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )


@triton.jit
def _min_p_kernel(logits, log_min_p, vocab, logits_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    below = tl.load(log_min_p + row)
    if below == float("-inf"):
        return
    logits += row * logits_row
    lane = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        token = first + lane
        highest = tl.maximum(highest, tl.load(logits + token, mask=token < vocab, other=float("-inf")))
    threshold = tl.max(highest, 0) + below
    for first in range(0, vocab, BLOCK):
        token = first + lane
        logit = tl.load(logits + token, mask=token < vocab, other=float("inf"))
        tl.store(logits + token, tl.full([BLOCK], float("-inf"), tl.float32), mask=logit < threshold)


def _example(num_rows: int, vocab: int) -> None:
    apply_min_p(torch.empty(num_rows, vocab, device="meta"), torch.empty(num_rows, device="meta"))


AOT_VARIANTS = [Variant(f"vocabulary of {vocab}", _example, {"num_rows": 64, "vocab": vocab}) for vocab in (128256, 50257)]
