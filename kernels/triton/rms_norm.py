"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467) on a GPU, alone or after adding a residual."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.variant import Variant

ELEMENTS = 2048  # a program takes several short rows (the heads of a query norm) to have as many as this
ELEMENTS_PER_WARP = 512  # 16 a thread: two 16-byte loads of 16-bit elements


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As `kernels.rms_norm.rms_norm`; x may be a slice of a fused projection, its last dimension contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    hidden = x.shape[-1]
    rows = x if x.dim() == 3 else x.reshape(-1, 1, hidden)
    if out.numel():
        _launch(_rms_norm_kernel, (out, rows, weight), rows, epsilon, rows.shape[1], rows.stride(0), rows.stride(1))
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As `kernels.rms_norm.add_rms_norm`."""
    out = torch.empty_like(x)
    if out.numel():
        _launch(_add_rms_norm_kernel, (out, x, residual, weight), x, epsilon)
    return out


def _launch(kernel: triton.JITFunction, tensors: tuple[torch.Tensor, ...], x: torch.Tensor, epsilon: float, *layout: int) -> None:
    hidden = x.shape[-1]
    num_rows = x.numel() // hidden
    width = triton.next_power_of_2(hidden)
    rows = max(1, ELEMENTS // width)
    kernel[(triton.cdiv(num_rows, rows),)](
        *tensors,
        *layout,
        num_rows,
        epsilon,
        HIDDEN=hidden,
        ROWS=rows,
        WIDTH=width,
        num_warps=min(16, max(1, rows * width // ELEMENTS_PER_WARP)),
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    out, x, weight, row_heads, token_stride, head_stride, num_rows, epsilon,
    HIDDEN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS rows; row r is x[r // row_heads, r % row_heads]. out [num_rows, HIDDEN], contiguous."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    element = tl.arange(0, WIDTH)
    inside = (row < num_rows)[:, None] & (element < HIDDEN)[None, :]
    begin = (row // row_heads).to(tl.int64) * token_stride + (row % row_heads) * head_stride
    values = tl.load(x + begin[:, None] + element[None, :], mask=inside, other=0.0)
    normed = _normalize(values, weight, element, epsilon, HIDDEN)
    tl.store(out + row.to(tl.int64)[:, None] * HIDDEN + element[None, :], normed, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    out, x, residual, weight, num_rows, epsilon, HIDDEN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """residual += x, out = norm of it; all [num_rows, HIDDEN], contiguous. The sum is rounded before its norm is taken, as if it
    were read back from memory."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    element = tl.arange(0, WIDTH)
    inside = (row < num_rows)[:, None] & (element < HIDDEN)[None, :]
    places = row.to(tl.int64)[:, None] * HIDDEN + element[None, :]
    added = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    values = (tl.load(residual + places, mask=inside, other=0.0).to(tl.float32) + added).to(residual.dtype.element_ty)
    tl.store(residual + places, values, mask=inside)
    tl.store(out + places, _normalize(values, weight, element, epsilon, HIDDEN), mask=inside)


@triton.jit
def _normalize(values, weight, element, epsilon, HIDDEN: tl.constexpr):
    """values [ROWS, WIDTH], zero beyond HIDDEN. As Llama casts: float32 up to the scaled value, the product with the weight in the
    values' type."""
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / HIDDEN + epsilon)
    scaled = (wide * scale[:, None]).to(values.dtype).to(tl.float32)
    weights = tl.load(weight + element, mask=element < HIDDEN, other=0.0).to(tl.float32)
    return (scaled * weights[None, :]).to(values.dtype)


def _example(hidden: int) -> None:
    x, residual = torch.empty(2, 256, hidden, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(hidden, dtype=torch.bfloat16, device="meta")
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, residual, weight, 1e-5)


def _example_heads(head_dim: int) -> None:
    query = torch.empty(256, 48, head_dim, dtype=torch.bfloat16, device="meta")[:, :32]
    rms_norm(query, torch.empty(head_dim, dtype=torch.bfloat16, device="meta"), 1e-5)


AOT_VARIANTS = [
    *(Variant(f"bfloat16, hidden {hidden}", _example, {"hidden": hidden}) for hidden in (576, 4096, 8192)),
    *(Variant(f"bfloat16, query heads of {head_dim}", _example_heads, {"head_dim": head_dim}) for head_dim in (64, 128)),
]
