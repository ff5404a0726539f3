"""Penalties on a GPU: work in proportion to the tokens that a row holds, not to the vocabulary.

The first kernel counts each row's tokens. The second visits them again; whichever visit of a token takes the count away (and
leaves zero) changes the logit. Additions of integers and one visit a token: the same bits in any order of visits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.variant import Variant

BLOCK = 1024  # tokens a program


def apply_penalties(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    num_prompt_tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """As `kernels.penalties.apply_penalties`; takes [num_rows, vocab] int32 of memory, and longest rows of token_ids.shape[1]."""
    num_rows, vocab = logits.shape
    grid = (num_rows, triton.cdiv(token_ids.shape[1], BLOCK))
    if grid[0] == 0 or grid[1] == 0:
        return
    # Twice the number of times that a token is in the output, plus one if it is in the prompt.
    counts = torch.zeros(num_rows, vocab, dtype=torch.int32, device=logits.device)
    shared = (token_ids, rows, num_prompt_tokens, num_tokens, presence, frequency, repetition, vocab, token_ids.stride(0))
    _count_tokens_kernel[grid](counts, *shared, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False)
    _penalize_kernel[grid](logits, logits.stride(0), counts, *shared, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False)


@triton.jit(do_not_specialize=["token_row"])
def _count_tokens_kernel(
    counts, token_ids, rows, num_prompt_tokens, num_tokens, presence, frequency, repetition, vocab, token_row,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(num_tokens + row)
    if tl.program_id(1) * BLOCK >= length:
        return
    if _is_neutral(row, presence, frequency, repetition):
        return
    tokens = token_ids + tl.load(rows + row).to(tl.int64) * token_row
    token = tl.load(tokens + place, mask=place < length, other=0)
    counter = counts + row.to(tl.int64) * vocab + token
    prompt_length = tl.load(num_prompt_tokens + row)
    tl.atomic_or(counter, 1, mask=place < tl.minimum(prompt_length, length), sem="relaxed")
    tl.atomic_add(counter, 2, mask=(place >= prompt_length) & (place < length), sem="relaxed")


@triton.jit(do_not_specialize=["token_row"])
def _penalize_kernel(
    logits, logits_row, counts, token_ids, rows, num_prompt_tokens, num_tokens, presence, frequency, repetition, vocab, token_row,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(num_tokens + row)
    if tl.program_id(1) * BLOCK >= length:
        return
    if _is_neutral(row, presence, frequency, repetition):
        return
    tokens = token_ids + tl.load(rows + row).to(tl.int64) * token_row
    token = tl.load(tokens + place, mask=place < length, other=0)
    taken = tl.atomic_xchg(counts + row.to(tl.int64) * vocab + token, 0, mask=place < length, sem="relaxed")
    is_first = (place < length) & (taken > 0)
    logit_place = logits + row.to(tl.int64) * logits_row + token
    logit = tl.load(logit_place, mask=is_first, other=0.0)
    factor = tl.load(repetition + row)
    logit = tl.where(logit > 0, tl.div_rn(logit, tl.zeros([BLOCK], tl.float32) + factor), logit * factor)
    count = (taken // 2).to(tl.float32)
    lowered = logit - tl.load(frequency + row) * count - tl.load(presence + row)
    tl.store(logit_place, tl.where(count > 0, lowered, logit), mask=is_first)


@triton.jit
def _is_neutral(row, presence, frequency, repetition):
    return (tl.load(presence + row) == 0.0) & (tl.load(frequency + row) == 0.0) & (tl.load(repetition + row) == 1.0)


def _example(num_rows: int, vocab: int, max_len: int) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    logits = empty(num_rows, vocab, dtype=torch.float32)
    integers = [empty(num_rows) for _ in range(3)]
    strengths = [empty(num_rows, dtype=torch.float32) for _ in range(3)]
    apply_penalties(logits, empty(num_rows, max_len), *integers, *strengths)


AOT_VARIANTS = [Variant("vocabulary of 128256", _example, {"num_rows": 64, "vocab": 128256, "max_len": 8192})]
