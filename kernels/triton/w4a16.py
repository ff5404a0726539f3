"""Linear layers with weights of 4 bits on a GPU: they are unpacked in registers on their way into the matrix product.

The product is computed transposed, out.T = weight @ x.T: matrix units take the left operand from registers, so that unpacked
weights need not go through shared memory. A step of the loop stays within one group: it has one scale and zero an output channel.

With few rows and output channels there are too few tiles to keep all multiprocessors at reading weights. Then input channels are
split too, and a second kernel adds the parts, in their order. In how many parts depends on shapes alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.variant import Variant

MAX_DEPTH = 64  # bytes a step: twice as many weights
PROGRAMS = 256  # wanted, two a multiprocessor of an H100
MAX_PARTS = 8
MIN_STEPS = 8  # of a part: fewer do not fill the pipeline
SPLIT_ROWS = 64  # up to which a split is worth its partial sums
SUM_BLOCK = 1024


@dataclass(frozen=True)
class Tile:
    columns: int  # output channels
    rows: int
    num_warps: int
    num_stages: int


# By (float32 activations, the number of rows up to which a tile serves).
TILES = {
    (False, 16): Tile(64, 16, 4, 5),
    (False, 64): Tile(64, 64, 4, 4),
    (False, math.inf): Tile(128, 128, 8, 3),
    (True, math.inf): Tile(64, 16, 8, 2),
}


def linear_w4a16(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `kernels.w4a16.linear_w4a16`; packed, scales and zeros contiguous."""
    rows, in_features = x.shape
    num_groups, out_features = scales.shape
    half_group = in_features // num_groups // 2
    depth = min(MAX_DEPTH, half_group & -half_group)  # a power of two that divides it
    if depth < 16:
        raise ValueError(f"groups of {2 * half_group} weights: the size must be a multiple of 32")
    out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    is_wide = x.dtype == torch.float32
    tile = next(tile for (wide, limit), tile in TILES.items() if wide == is_wide and rows <= limit)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(out_features, tile.columns)
    steps = in_features // 2 // depth
    parts = _num_parts(rows, tiles, steps)
    partial = out if parts == 1 else torch.empty(parts, rows, out_features, dtype=torch.float32, device=x.device)
    _linear_w4a16_kernel[(tiles, parts)](
        partial,
        x,
        packed,
        scales,
        zeros,
        bias if parts == 1 else None,
        rows,
        out_features,
        in_features,
        x.stride(0),
        triton.cdiv(steps, parts),
        HALF_GROUP=half_group,
        COLUMNS=tile.columns,
        ROWS=tile.rows,
        DEPTH=depth,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages + MAX_DEPTH // depth - 1,  # small groups: steps of fewer bytes, more of them on their way
        enable_fp_fusion=False,
    )
    if parts > 1:
        _sum_parts_kernel[(rows, triton.cdiv(out_features, SUM_BLOCK))](
            out, partial, bias, out_features, PARTS=parts, BLOCK=SUM_BLOCK, num_warps=4, enable_fp_fusion=False
        )
    return out


def _num_parts(rows: int, tiles: int, steps: int) -> int:
    if rows > SPLIT_ROWS:
        return 1
    return max(1, min(MAX_PARTS, PROGRAMS // tiles, steps // MIN_STEPS))


@triton.jit(do_not_specialize=["rows", "part_steps"])
def _linear_w4a16_kernel(
    out, x, packed, scales, zeros, bias, rows, out_features, in_features, x_row, part_steps,
    HALF_GROUP: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A program a tile of out [parts, rows, out_features] and a part of part_steps steps; eight tiles of rows take the same weights
    one after the other."""
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles = tl.cdiv(out_features, COLUMNS)
    program = tl.program_id(0)
    row_tile, column_tile = tl.swizzle2d(program // column_tiles, program % column_tiles, row_tiles, column_tiles, 8)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, DEPTH)
    row_inside = row < rows
    column_inside = column < out_features
    x_places = x + row.to(tl.int64)[None, :] * x_row + lane[:, None]
    packed_places = packed + column.to(tl.int64)[:, None] * (in_features // 2) + lane[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    part = tl.program_id(1)
    for step in range(part * part_steps, tl.minimum((part + 1) * part_steps, in_features // 2 // DEPTH)):
        first = step * DEPTH
        group = first // HALF_GROUP
        channel = first + group * HALF_GROUP  # of the low nibbles; that of the high ones is half a group further
        both = tl.load(packed_places + first, mask=column_inside[:, None], other=0)
        scale = tl.load(scales + group * out_features + column, mask=column_inside, other=0.0).to(tl.float32)
        zero = tl.full([COLUMNS], 8.0, tl.float32)
        if zeros is not None:
            zero = tl.load(zeros + group * out_features + column, mask=column_inside, other=0.0).to(tl.float32)
        low = (((both & 15).to(tl.float32) - zero[:, None]) * scale[:, None]).to(x.dtype.element_ty)
        high = (((both >> 4).to(tl.float32) - zero[:, None]) * scale[:, None]).to(x.dtype.element_ty)
        x_low = tl.load(x_places + channel, mask=row_inside[None, :], other=0.0)
        x_high = tl.load(x_places + channel + HALF_GROUP, mask=row_inside[None, :], other=0.0)
        total = tl.dot(low, x_low, total, input_precision="tf32x3")
        total = tl.dot(high, x_high, total, input_precision="tf32x3")
    if bias is not None:
        total += tl.load(bias + column, mask=column_inside, other=0.0).to(tl.float32)[:, None]
    places = out + (part * rows + row).to(tl.int64)[None, :] * out_features + column[:, None]
    tl.store(places, total.to(out.dtype.element_ty), mask=row_inside[None, :] & column_inside[:, None])


@triton.jit
def _sum_parts_kernel(out, partial, bias, out_features, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = the sum of partial[:, row] + bias; partial [PARTS, rows, out_features]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < out_features
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(partial + (part * tl.num_programs(0) + row) * out_features + column, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_features + column, total.to(out.dtype.element_ty), mask=inside)


def _example(dtype: torch.dtype, rows: int, out_features: int, group_size: int, has_zeros: bool) -> None:
    in_features = 4096
    scales = torch.empty(in_features // group_size, out_features, dtype=torch.float16, device="meta")
    linear_w4a16(
        torch.empty(rows, in_features, dtype=dtype, device="meta"),
        torch.empty(out_features, in_features // 2, dtype=torch.uint8, device="meta"),
        scales,
        scales if has_zeros else None,
    )


AOT_VARIANTS = [
    Variant(
        f"{str(dtype)[6:]}, {rows} rows, 4096 to {out_features}, groups of {group_size}",
        _example,
        {"dtype": dtype, "rows": rows, "out_features": out_features, "group_size": group_size, "has_zeros": has_zeros},
        matrix=("_linear_w4a16_kernel",),
    )
    for dtype, rows, out_features, group_size, has_zeros in (
        (torch.bfloat16, 16, 4096, 128, False),
        (torch.bfloat16, 16, 14336, 128, True),
        (torch.bfloat16, 64, 4096, 128, True),
        (torch.bfloat16, 2048, 14336, 128, True),
        (torch.bfloat16, 16, 14336, 32, True),
        (torch.float32, 16, 14336, 128, False),
    )
]
