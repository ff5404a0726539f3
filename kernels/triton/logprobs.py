"""Log probabilities of chosen tokens on a GPU: a program a row, which writes no row of log_softmax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.variant import Variant

BLOCK = 4096  # tokens a step
MAX_WIDTH = 1024  # chosen tokens a step


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.logprobs.gather_logprobs`."""
    num_rows, vocab = logits.shape
    num_chosen = token_ids.shape[1]
    logprobs = torch.empty(num_rows, num_chosen, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        _gather_logprobs_kernel[(num_rows,)](
            logprobs,
            ranks,
            logits,
            token_ids,
            vocab,
            num_chosen,
            logits.stride(0),
            token_ids.stride(0),
            BLOCK=BLOCK,
            WIDTH=min(MAX_WIDTH, triton.next_power_of_2(num_chosen)),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return logprobs, ranks


@triton.jit(do_not_specialize=["num_chosen", "token_ids_row"])
def _gather_logprobs_kernel(
    logprobs, ranks, logits, token_ids, vocab, num_chosen, logits_row, token_ids_row, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    """logprob = logit - highest - log(sum(exp(logit - highest)))"""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    token_ids += row * token_ids_row
    own = tl.load(logits + tl.load(token_ids))
    lane = tl.arange(0, BLOCK)
    highest_of_lane = tl.full([BLOCK], float("-inf"), tl.float32)
    higher = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab, BLOCK):
        token = first + lane
        logit = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        highest_of_lane = tl.maximum(highest_of_lane, logit)
        higher += (logit > own).to(tl.int32)
    tl.store(ranks + row, 1 + tl.sum(higher, 0))
    highest = tl.max(highest_of_lane, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        token = first + lane
        logit = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        total += tl.exp(logit - highest)
    normalizer = tl.log(tl.sum(total, 0))
    for first in range(0, num_chosen, WIDTH):
        i = first + tl.arange(0, WIDTH)
        token = tl.load(token_ids + i, mask=i < num_chosen, other=0)
        logit = tl.load(logits + token, mask=i < num_chosen, other=0.0)
        tl.store(logprobs + row * num_chosen + i, logit - highest - normalizer, mask=i < num_chosen)


def _example(num_chosen: int, vocab: int) -> None:
    gather_logprobs(torch.empty(64, vocab, device="meta"), torch.empty(64, num_chosen, dtype=torch.int64, device="meta"))


AOT_VARIANTS = [
    Variant(f"{num_chosen} of {vocab}", _example, {"num_chosen": num_chosen, "vocab": vocab})
    for num_chosen, vocab in ((6, 128256), (128257, 128256))
]
