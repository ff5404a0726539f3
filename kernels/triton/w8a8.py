"""Linear layers in 8 bits on a GPU: rows of activations are quantized by one kernel, multiplied with the weight by another.

float8 e4m3 needs sm_90; its sums leave the matrix units, which keep some 14 bits of them, for float32 after each step of the loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.variant import Variant


@dataclass(frozen=True)
class Tile:
    rows: int
    columns: int  # output channels
    depth: int  # input channels a step
    num_warps: int
    num_stages: int


# By the number of rows up to which a tile serves. Few rows: what counts is that weights of 4096 channels keep
# 128 multiprocessors busy, and that each has some 30 KB on their way.
TILES = {16: Tile(16, 32, 256, 4, 4), 64: Tile(64, 64, 128, 4, 4), math.inf: Tile(128, 128, 128, 8, 4)}


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.w8a8.quantize_rows`; any row stride."""
    rows, columns = x.shape
    q = torch.empty(rows, columns, dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        width = triton.next_power_of_2(columns)
        _quantize_rows_kernel[(rows,)](
            q,
            scales,
            x,
            columns,
            x.stride(0),
            INTEGER=dtype == torch.int8,
            WIDTH=width,
            num_warps=min(16, max(1, width // 1024)),
            enable_fp_fusion=False,
        )
    return q, scales


def linear_w8a8(
    x: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As `kernels.w8a8.linear_w8a8`; the weight contiguous."""
    rows, in_features = x.shape
    out_features = weight.shape[0]
    out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    q, scales = quantize_rows(x, weight.dtype)
    tile = next(tile for limit, tile in TILES.items() if rows <= limit)
    _linear_w8a8_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(out_features, tile.columns),)](
        out,
        q,
        scales,
        weight,
        weight_scales,
        bias,
        rows,
        out_features,
        in_features,
        INTEGER=weight.dtype == torch.int8,
        WHOLE=in_features % tile.depth == 0,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _quantize_rows_kernel(q, scales, x, columns, x_row, INTEGER: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < columns
    wide = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    LIMIT: tl.constexpr = 127.0 if INTEGER else 448.0
    finite = tl.abs(wide) < float("inf")
    wide = tl.where(finite, wide, 0.0)
    scale = tl.div_rn(tl.max(tl.abs(wide), 0), tl.full((), LIMIT, tl.float32))
    tl.store(scales + row, tl.where(tl.min(finite.to(tl.int32), 0) > 0, scale, float("nan")))
    scaled = tl.div_rn(wide, tl.zeros([WIDTH], tl.float32) + tl.where(scale > 0.0, scale, 1.0))
    if INTEGER:
        scaled = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2**23 leaves no bits for a fraction: rounded to nearest, ties to even
    tl.store(q + row * columns + column, scaled.to(q.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _linear_w8a8_kernel(
    out, q, scales, weight, weight_scales, bias, rows, out_features, in_features,
    INTEGER: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A program a tile of out [rows, out_features]; eight tiles of rows take the same weights one after the other."""
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles = tl.cdiv(out_features, COLUMNS)
    program = tl.program_id(0)
    row_tile, column_tile = tl.swizzle2d(program // column_tiles, program % column_tiles, row_tiles, column_tiles, 8)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    channel = tl.arange(0, DEPTH)
    q_places = q + row.to(tl.int64)[:, None] * in_features + channel[None, :]
    weight_places = weight + column.to(tl.int64)[None, :] * in_features + channel[:, None]
    row_inside = row < rows
    column_inside = column < out_features
    total = tl.zeros([ROWS, COLUMNS], tl.int32 if INTEGER else tl.float32)
    for first in range(0, in_features, DEPTH):
        if WHOLE:
            left = tl.load(q_places + first, mask=row_inside[:, None], other=0.0)
            right = tl.load(weight_places + first, mask=column_inside[None, :], other=0.0)
        else:
            known = first + channel < in_features
            left = tl.load(q_places + first, mask=row_inside[:, None] & known[None, :], other=0.0)
            right = tl.load(weight_places + first, mask=column_inside[None, :] & known[:, None], other=0.0)
        if INTEGER:
            total = tl.dot(left, right, total, out_dtype=tl.int32)
        else:
            total = tl.dot(left, right, total, max_num_imprecise_acc=DEPTH)
    row_scale = tl.load(scales + row, mask=row_inside, other=0.0)
    column_scale = tl.load(weight_scales + column, mask=column_inside, other=0.0)
    result = total.to(tl.float32) * row_scale[:, None] * column_scale[None, :]
    if bias is not None:
        result += tl.load(bias + column, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    places = out + row.to(tl.int64)[:, None] * out_features + column[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=row_inside[:, None] & column_inside[None, :])


def _example(dtype: torch.dtype, rows: int, in_features: int, out_features: int) -> None:
    linear_w8a8(
        torch.empty(rows, in_features, dtype=torch.bfloat16, device="meta"),
        torch.empty(out_features, in_features, dtype=dtype, device="meta"),
        torch.empty(out_features, device="meta"),
    )


AOT_VARIANTS = [
    Variant(
        f"{name}, {rows} rows, {in_features} to {out_features}",
        _example,
        {"dtype": dtype, "rows": rows, "in_features": in_features, "out_features": out_features},
        chips=chips,
        matrix=("_linear_w8a8_kernel",),
    )
    for name, dtype, chips in (("int8", torch.int8, (80, 90, 100)), ("float8_e4m3fn", torch.float8_e4m3fn, (90, 100)))
    for rows, in_features, out_features in ((16, 4096, 4096), (64, 4096, 4096), (2048, 14336, 4096))
]
