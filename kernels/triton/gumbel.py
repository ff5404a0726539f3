"""Sampling by the Gumbel-max trick on a GPU: the noise has the bits of `kernels.gumbel`, so that a request draws the same tokens.

A block of the vocabulary a program, then a program a row over the blocks' winners: with few rows all multiprocessors have work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.float32 import log_float32
from kernels.triton.variant import Variant

BLOCK = 2048  # tokens a program


def gumbel_argmax(logits: torch.Tensor, greedy: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """As `kernels.gumbel.gumbel_argmax`."""
    num_rows, vocab = logits.shape
    num_blocks = triton.cdiv(vocab, BLOCK)
    drawn = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return drawn
    scores = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    _best_of_block_kernel[(num_rows, num_blocks)](
        scores,
        tokens,
        logits,
        greedy,
        seeds,
        positions,
        vocab,
        logits.stride(0),
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    _best_of_row_kernel[(num_rows,)](
        drawn, scores, tokens, num_blocks, WIDTH=triton.next_power_of_2(num_blocks), num_warps=1, enable_fp_fusion=False
    )
    return drawn


@triton.jit
def gumbel_noise(seed, position, first, BLOCK: tl.constexpr):
    """[BLOCK] noise of tokens first..first+BLOCK-1, first a multiple of four; one call of Philox 4x32-10 for four tokens. Its key
    is the seed, its counter (token // 4, 0, low and high half of the position), the token's word token % 4."""
    quad = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    low = quad * 0 + position.to(tl.uint32)
    high = quad * 0 + (position >> 32).to(tl.uint32)
    word0, word1, word2, word3 = tl.philox(seed, quad, quad * 0, low, high)
    words = tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))
    # 23 bits and a half: (0, 1) without its ends, exact in float32.
    uniform = ((words >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -log_float32(-log_float32(uniform))


@triton.jit
def _best_of_block_kernel(scores, tokens, logits, greedy, seeds, positions, vocab, logits_row, BLOCK: tl.constexpr):
    """scores, tokens [num_rows, num_blocks]: highest of logit + noise, and whose it is; of equals the lowest token."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    token = first + tl.arange(0, BLOCK)
    score = tl.load(logits + row * logits_row + token, mask=token < vocab, other=float("-inf"))
    if tl.load(greedy + row) == 0:
        score += gumbel_noise(tl.load(seeds + row), tl.load(positions + row), first, BLOCK)
    best, place = tl.max(score, 0, return_indices=True)
    out = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(scores + out, best)
    tl.store(tokens + out, first + place)


@triton.jit
def _best_of_row_kernel(drawn, scores, tokens, num_blocks, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, WIDTH)
    score = tl.load(scores + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    place = tl.argmax(score, 0)
    tl.store(drawn + row, tl.load(tokens + row * num_blocks + place).to(tl.int64))


def _example(num_rows: int, vocab: int) -> None:
    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    gumbel_argmax(
        empty(num_rows, vocab, dtype=torch.float32),
        empty(num_rows, dtype=torch.bool),
        empty(num_rows, dtype=torch.int64),
        empty(num_rows, dtype=torch.int64),
    )


AOT_VARIANTS = [Variant(f"vocabulary of {vocab}", _example, {"num_rows": 64, "vocab": vocab}) for vocab in (128256, 50257)]
