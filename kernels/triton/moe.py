"""Mixture of experts on a GPU: pairs (token, choice) are sorted by expert, multiplied expert by expert in one launch a matrix, and
each token's results summed.

Every expert's pairs are padded to whole tiles of rows, so that a tile has one expert. How many tiles there are is known on the
device alone: the grid has room for the most there can be, and programs too many return at once. Pairs keep their order, without
atomics; each writes its own row of the intermediate results: the same bits in every run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.variant import Variant

ALIGN_BLOCK = 1024  # pairs a step of the sort
SUM_BLOCK = 1024  # elements of a token a program of the sum


@dataclass(frozen=True)
class Tile:
    rows: int  # pairs
    columns: int  # of the gated product, which has two matrices; the plain one takes twice as many
    depth: int
    num_warps: int
    num_stages: int


# By (float32, the mean number of pairs an expert up to which a tile serves).
TILES = {
    (False, 16): Tile(16, 64, 128, 4, 3),
    (False, 64): Tile(64, 64, 64, 4, 4),
    (False, math.inf): Tile(128, 64, 64, 8, 4),
    (True, math.inf): Tile(16, 32, 32, 4, 2),
}


def fused_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """As `kernels.moe.fused_experts`; all tensors contiguous."""
    num_tokens, hidden = x.shape
    num_experts, _, intermediate = down.shape
    top_k = experts.shape[1]
    out = torch.empty_like(x)
    if num_tokens == 0:
        return out
    num_pairs = num_tokens * top_k
    is_wide = x.dtype == torch.float32
    mean = num_pairs // num_experts
    tile = next(tile for (wide, limit), tile in TILES.items() if wide == is_wide and mean <= limit)
    pairs, tile_experts = align_pairs(experts, num_experts, tile.rows)
    gated = torch.empty(num_pairs, intermediate, dtype=x.dtype, device=x.device)
    _multiply_experts(gated, x, gate_up, pairs, tile_experts, top_k, True, tile)
    results = torch.empty(num_pairs, hidden, dtype=x.dtype, device=x.device)
    _multiply_experts(results, gated, down, pairs, tile_experts, 1, False, tile)
    _sum_choices_kernel[(num_tokens, triton.cdiv(hidden, SUM_BLOCK))](
        out, results, weights, hidden, TOP_K=top_k, BLOCK=SUM_BLOCK, num_warps=4, enable_fp_fusion=False
    )
    return out


def align_pairs(experts: torch.Tensor, num_experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pair number token * top_k + choice for each row of each tile, an expert's pairs together, padded with num_pairs; and each
    tile's expert, -1 for tiles that there is no pair for. [num_tiles * rows], [num_tiles] int32."""
    num_pairs = experts.numel()
    num_tiles = num_pairs // rows + min(num_pairs, num_experts)  # at most one tile an expert is not full
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    pairs = torch.empty(num_tiles * rows, dtype=torch.int32, device=experts.device)
    tile_experts = torch.empty(num_tiles, dtype=torch.int32, device=experts.device)
    _count_pairs_kernel[(num_experts,)](counts, experts, num_pairs, BLOCK=ALIGN_BLOCK, num_warps=4, enable_fp_fusion=False)
    _align_pairs_kernel[(num_experts,)](
        pairs,
        tile_experts,
        counts,
        experts,
        num_pairs,
        num_tiles,
        EXPERTS=triton.next_power_of_2(num_experts),
        ROWS=rows,
        BLOCK=ALIGN_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return pairs, tile_experts


def _multiply_experts(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    pairs: torch.Tensor,
    tile_experts: torch.Tensor,
    pairs_per_row: int,
    is_gated: bool,
    tile: Tile,
) -> None:
    num_pairs, out_features = out.shape
    in_features = x.shape[1]
    columns = tile.columns if is_gated else 2 * tile.columns
    _multiply_experts_kernel[(tile_experts.shape[0], triton.cdiv(out_features, columns))](
        out,
        x,
        weight,
        pairs,
        tile_experts,
        num_pairs,
        out_features,
        in_features,
        PAIRS_PER_ROW=pairs_per_row,
        GATED=is_gated,
        WHOLE=in_features % tile.depth == 0,
        ROWS=tile.rows,
        COLUMNS=columns,
        DEPTH=tile.depth,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_pairs"])
def _count_pairs_kernel(counts, experts, num_pairs, BLOCK: tl.constexpr):
    """A program an expert."""
    expert = tl.program_id(0)
    count = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        count += (tl.load(experts + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(count, 0))


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _align_pairs_kernel(
    pairs, tile_experts, counts, experts, num_pairs, num_tiles,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program an expert; the last one marks the tiles that are left."""
    expert = tl.program_id(0)
    num_experts = tl.num_programs(0)
    other = tl.arange(0, EXPERTS)
    tiles = (tl.load(counts + other, mask=other < num_experts, other=0) + ROWS - 1) // ROWS
    first_tile = tl.sum(tl.where(other < expert, tiles, 0), 0)
    count = tl.load(counts + expert)
    end_tile = first_tile + (count + ROWS - 1) // ROWS
    begin = first_tile * ROWS
    lane = tl.arange(0, BLOCK)
    placed = 0
    for first in range(0, num_pairs, BLOCK):
        pair = first + lane
        mine = (tl.load(experts + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
        place = begin + placed + tl.cumsum(mine, 0) - 1
        tl.store(pairs + place, pair, mask=mine > 0)
        placed += tl.sum(mine, 0)
    padding = begin + count + tl.arange(0, ROWS)
    tl.store(pairs + padding, tl.zeros([ROWS], tl.int32) + num_pairs, mask=padding < end_tile * ROWS)
    for first in range(first_tile, end_tile, BLOCK):
        tl.store(tile_experts + first + lane, tl.zeros([BLOCK], tl.int32) + expert, mask=first + lane < end_tile)
    if expert == num_experts - 1:
        for first in range(end_tile, num_tiles, BLOCK):
            tl.store(tile_experts + first + lane, tl.full([BLOCK], -1, tl.int32), mask=first + lane < num_tiles)


@triton.jit(do_not_specialize=["num_pairs"])
def _multiply_experts_kernel(
    out, x, weight, pairs, tile_experts, num_pairs, out_features, in_features,
    PAIRS_PER_ROW: tl.constexpr, GATED: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[pair] = x[pair // PAIRS_PER_ROW] @ weight[expert].T, or, if GATED, silu(x @ gate.T) * (x @ up.T) with the rows of gate
    before those of up in weight[expert]. A program a tile of pairs and columns; tiles that share weights are launched together."""
    expert = tl.load(tile_experts + tl.program_id(0))
    if expert < 0:
        return
    pair = tl.load(pairs + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    is_pair = pair < num_pairs
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_inside = column < out_features
    channel = tl.arange(0, DEPTH)
    x_places = x + (pair // PAIRS_PER_ROW).to(tl.int64)[:, None] * in_features + channel[None, :]
    matrix_size = out_features.to(tl.int64) * in_features
    expert_weight = weight + expert.to(tl.int64) * (2 * matrix_size if GATED else matrix_size)
    weight_places = expert_weight + column.to(tl.int64)[None, :] * in_features + channel[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    total_up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, in_features, DEPTH):
        row_mask = is_pair[:, None]
        column_mask = column_inside[None, :]
        if not WHOLE:
            row_mask = row_mask & (first + channel < in_features)[None, :]
            column_mask = column_mask & (first + channel < in_features)[:, None]
        left = tl.load(x_places + first, mask=row_mask, other=0.0)
        right = tl.load(weight_places + first, mask=column_mask, other=0.0)
        total = tl.dot(left, right, total, input_precision="tf32x3")
        if GATED:
            right_up = tl.load(weight_places + matrix_size + first, mask=column_mask, other=0.0)
            total_up = tl.dot(left, right_up, total_up, input_precision="tf32x3")
    if GATED:
        total = total * tl.sigmoid(total) * total_up
    places = out + pair.to(tl.int64)[:, None] * out_features + column[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=is_pair[:, None] & column_inside[None, :])


@triton.jit
def _sum_choices_kernel(out, results, weights, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out[token] = the sum over choices of weights[token, choice] * results[token * TOP_K + choice], in float32."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        result = tl.load(results + (token * TOP_K + choice) * hidden + element, mask=inside, other=0.0).to(tl.float32)
        total += result * tl.load(weights + token * TOP_K + choice)
    tl.store(out + token * hidden + element, total.to(out.dtype.element_ty), mask=inside)


def _example(dtype: torch.dtype, num_tokens: int, num_experts: int, top_k: int, hidden: int, intermediate: int) -> None:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    fused_experts(
        empty(num_tokens, hidden),
        empty(num_experts, 2 * intermediate, hidden),
        empty(num_experts, hidden, intermediate),
        empty(num_tokens, top_k, dtype=torch.int32),
        empty(num_tokens, top_k, dtype=torch.float32),
    )


AOT_VARIANTS = [
    Variant(
        f"{str(dtype)[6:]}, {num_tokens} tokens, {top_k} of {num_experts} experts",
        _example,
        {
            "dtype": dtype,
            "num_tokens": num_tokens,
            "num_experts": num_experts,
            "top_k": top_k,
            "hidden": hidden,
            "intermediate": intermediate,
        },
        matrix=("_multiply_experts_kernel",),
    )
    for dtype, num_tokens, num_experts, top_k, hidden, intermediate in (
        (torch.bfloat16, 32, 128, 8, 2048, 768),  # Qwen3-30B-A3B
        (torch.bfloat16, 512, 128, 8, 2048, 768),
        (torch.bfloat16, 4096, 8, 2, 4096, 14336),  # Mixtral-8x7B
        (torch.float32, 32, 8, 2, 512, 1024),
    )
]
