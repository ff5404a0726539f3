"""Top-k and top-p filters on a GPU without sorting: the lowest kept logit is found by bisection, as a number.

A logit's bits, read as an integer that is ordered like the number, are the axis of the search: the threshold is the highest value
at which what lies at or above it still weighs enough (k tokens, or top_p of the probability). Each step of the search looks at
three pivots. It does so over few logits: a first pass takes the maximum of each lane of the tiles; the k-th highest of those
bounds the k-th highest of all from below, and only what is not below it (or, for top-p, what can be in the nucleus) is searched.
So a row is read three or four times, mostly from the cache, and little is written. Pivots are the idea of Qrita (arXiv 2602.01518).

Weights are float32 with the CPU's bits and sums float64: the kept set differs from a sort's only where the last token of a nucleus
is a matter of the 16th digit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.float32 import exp_float32
from kernels.triton.variant import Variant

BLOCK = 2048  # tokens a step; top-k above it has no lower bound and searches the whole row
_LOWEST = tl.constexpr(-2139095041)  # the ordered integer of minus infinity


def apply_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    """As `kernels.top_k_top_p.apply_top_k_top_p`; takes as much memory as the logits."""
    num_rows, vocab = logits.shape
    if num_rows == 0:
        return
    tiles = triton.cdiv(vocab, BLOCK)
    candidates = torch.empty(num_rows, tiles * BLOCK, dtype=torch.float32, device=logits.device)
    _top_k_top_p_kernel[(num_rows,)](
        logits,
        candidates,
        top_k,
        top_p,
        vocab,
        logits.stride(0),
        tiles * BLOCK,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )


@triton.jit
def _top_k_top_p_kernel(logits, candidates, top_k, top_p, vocab, logits_row, candidates_row, BLOCK: tl.constexpr):
    """A program a row. candidates [num_rows, tiles, BLOCK]: a lane appends to its own column, so that nothing is counted across
    lanes and order plays no part."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    by_count = (k > 0) & (k < vocab)
    if (not by_count) & (p >= 1.0):
        return
    logits += row * logits_row
    candidates += row * candidates_row
    lane = tl.arange(0, BLOCK)
    lane_highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        token = first + lane
        lane_highest = tl.maximum(lane_highest, tl.load(logits + token, mask=token < vocab, other=float("-inf")))
    highest = tl.max(lane_highest, 0)
    if highest == float("-inf"):
        return
    top = _ordered(highest)

    low = top - top + _LOWEST
    lightest = p - p
    total = lightest.to(tl.float64)
    if by_count:
        if k <= BLOCK:
            tl.store(candidates + lane, lane_highest)
            tl.debug_barrier()
            low = _threshold(candidates, tl.full([BLOCK], 1, tl.int32), 1, low, top, k.to(tl.float64), highest, False, BLOCK)
            tl.debug_barrier()
    else:
        total = _total(logits, vocab, highest, BLOCK)
        # Tokens below (1 - p) / vocab together weigh less than 1 - p, so that the nucleus is full before the first of them.
        lightest = ((1.0 - p) / vocab * total * 0.999).to(tl.float32)
    floor = _float(low)
    height = tl.zeros([BLOCK], tl.int32)
    lane_lowest = lane_highest
    for first in range(0, vocab, BLOCK):
        token = first + lane
        logit = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        chosen = (token < vocab) & (logit >= floor) & (_weights(logit, highest) >= lightest)
        tl.store(candidates + height * BLOCK + lane, logit, mask=chosen)
        height += chosen.to(tl.int32)
        lane_lowest = tl.where(chosen, tl.minimum(lane_lowest, logit), lane_lowest)
    tl.debug_barrier()
    steps = tl.max(height, 0)
    low = _ordered(tl.min(tl.where(height > 0, lane_lowest, highest), 0))

    if by_count:
        low = _threshold(candidates, height, steps, low, top, k.to(tl.float64), highest, False, BLOCK)
        total = _mass(candidates, height, steps, _float(low), highest, BLOCK)
    limit = p.to(tl.float64) * total
    above = limit
    ties = 1
    if p < 1.0:
        low = _threshold(candidates, height, steps, low, top, limit, highest, True, BLOCK)
        above, ties = _above(candidates, height, steps, _float(low), highest, BLOCK)
    threshold = _float(low)
    weight = tl.sum(_weights(tl.zeros([1], tl.float32) + threshold, highest).to(tl.float64), 0)
    seen = 0
    for first in range(0, vocab, BLOCK):
        token = first + lane
        logit = tl.load(logits + token, mask=token < vocab, other=float("inf"))
        dropped = logit < threshold
        if ties > 1:  # of equals the lower ids are kept, while what is before them weighs less than the limit
            equal = (logit == threshold) & (token < vocab)
            before = above + (seen + tl.cumsum(equal.to(tl.int32), 0) - 1).to(tl.float64) * weight
            dropped |= equal & (before >= limit) & (before > 0)
            seen += tl.sum(equal.to(tl.int32), 0)
        tl.store(logits + token, tl.full([BLOCK], float("-inf"), tl.float32), mask=dropped)


@triton.jit
def _threshold(candidates, height, steps, low, high, limit, highest, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The highest ordered integer in [low, high] at or above which candidates weigh `limit`, one each unless WEIGHTED; at low
    they do, or low is the answer."""
    lane = tl.arange(0, BLOCK)
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    nothing = tl.zeros([BLOCK], tl.float64 if WEIGHTED else tl.int32)
    while low < high:
        quarter = (high - low + 3) // 4
        pivot1 = low + quarter
        pivot2 = tl.minimum(low + 2 * quarter, high)
        pivot3 = tl.minimum(low + 3 * quarter, high)
        logit1 = _float(pivot1)
        logit2 = _float(pivot2)
        logit3 = _float(pivot3)
        mass1 = nothing
        mass2 = nothing
        mass3 = nothing
        for step in range(0, steps):
            logit = tl.load(candidates + step * BLOCK + lane, mask=step < height, other=float("-inf"))
            weight = (step < height).to(tl.int32)
            if WEIGHTED:
                weight = tl.where(step < height, _weights(logit, highest), 0.0).to(tl.float64)
            mass1 += tl.where(logit >= logit1, weight, 0)
            mass2 += tl.where(logit >= logit2, weight, 0)
            mass3 += tl.where(logit >= logit3, weight, 0)
        reached1 = tl.sum(mass1, 0) >= limit
        reached2 = tl.sum(mass2, 0) >= limit
        reached3 = tl.sum(mass3, 0) >= limit
        high = tl.where(reached3, high, tl.where(reached2, pivot3, tl.where(reached1, pivot2, pivot1)) - 1)
        low = tl.where(reached3, pivot3, tl.where(reached2, pivot2, tl.where(reached1, pivot1, low)))
    return low.to(tl.int32)


@triton.jit
def _mass(candidates, height, steps, threshold, highest, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float64)
    for step in range(0, steps):
        logit = tl.load(candidates + step * BLOCK + lane, mask=step < height, other=float("-inf"))
        mass += tl.where((step < height) & (logit >= threshold), _weights(logit, highest), 0.0).to(tl.float64)
    return tl.sum(mass, 0)


@triton.jit
def _above(candidates, height, steps, threshold, highest, BLOCK: tl.constexpr):
    """The weight of the candidates above the threshold, and the number that equal it."""
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float64)
    ties = tl.zeros([BLOCK], tl.int32)
    for step in range(0, steps):
        logit = tl.load(candidates + step * BLOCK + lane, mask=step < height, other=float("-inf"))
        mass += tl.where((step < height) & (logit > threshold), _weights(logit, highest), 0.0).to(tl.float64)
        ties += ((step < height) & (logit == threshold)).to(tl.int32)
    return tl.sum(mass, 0), tl.sum(ties, 0)


@triton.jit
def _total(logits, vocab, highest, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float64)
    for first in range(0, vocab, BLOCK):
        token = first + lane
        logit = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        mass += _weights(logit, highest).to(tl.float64)
    return tl.sum(mass, 0)


@triton.jit
def _weights(logit, highest):
    return tl.where(logit == float("-inf"), 0.0, exp_float32(logit - highest))


@triton.jit
def _ordered(x):
    """float32 to an int32 that is ordered like it."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float(ordered):
    ordered = ordered.to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


def _example(num_rows: int, vocab: int) -> None:
    apply_top_k_top_p(
        torch.empty(num_rows, vocab, device="meta"),
        torch.empty(num_rows, dtype=torch.int32, device="meta"),
        torch.empty(num_rows, device="meta"),
    )


AOT_VARIANTS = [Variant(f"vocabulary of {vocab}", _example, {"num_rows": 64, "vocab": vocab}) for vocab in (128256, 50257)]
