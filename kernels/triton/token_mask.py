"""Grammars' masks on a GPU: a program for each block of a row's tokens, which writes only what is not allowed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.variant import Variant

BLOCK = 4096  # tokens a program


def apply_token_mask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """As `kernels.token_mask.apply_token_mask`."""
    vocab = logits.shape[1]
    if len(rows) == 0:
        return
    _token_mask_kernel[(len(rows), triton.cdiv(vocab, BLOCK))](
        logits, rows, masks, vocab, logits.stride(0), masks.stride(0), BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False
    )


@triton.jit
def _token_mask_kernel(logits, rows, masks, vocab, logits_row, masks_row, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(masks + place * masks_row + token // 32, mask=token < vocab, other=-1)
    allowed = (words >> (token % 32)) & 1
    row = tl.load(rows + place)
    tl.store(logits + row * logits_row + token, tl.full([BLOCK], float("-inf"), tl.float32), mask=(token < vocab) & (allowed == 0))


def _example(num_rows: int, vocab: int) -> None:
    rows = torch.empty(num_rows, dtype=torch.int64, device="meta")
    masks = torch.empty(num_rows, -(-vocab // 32), dtype=torch.int32, device="meta")
    apply_token_mask(torch.empty(num_rows, vocab, device="meta"), rows, masks)


AOT_VARIANTS = [Variant(f"vocabulary of {vocab}", _example, {"num_rows": 64, "vocab": vocab}) for vocab in (128256, 50257)]
