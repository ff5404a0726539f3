"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) on a GPU, two halves: dimension i turns with i + head_dim / 2."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.variant import Variant

HEADS = 16  # turned by one program


def rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """As `kernels.rope.rope`. Queries and keys, adjacent in a fused projection, are one x: one launch."""
    num_tokens, num_heads, head_dim = x.shape
    if num_tokens == 0:
        return
    heads = min(HEADS, triton.next_power_of_2(num_heads))
    half = triton.next_power_of_2(head_dim // 2)
    _rope_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        x,
        positions,
        cos_sin,
        x.stride(0),
        x.stride(1),
        num_heads,
        HALF=head_dim // 2,
        HEADS=heads,
        WIDTH=half,
        num_warps=max(1, heads * half // 256),
        enable_fp_fusion=False,
    )


@triton.jit
def _rope_kernel(
    x, positions, cos_sin, token_stride, head_stride, num_heads, HALF: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """A program turns HEADS heads of one token: (a, b) becomes (a cos - b sin, b cos + a sin), in float32, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, WIDTH)
    angles = cos_sin + tl.load(positions + token) * (2 * HALF) + dim
    cos = tl.load(angles, mask=dim < HALF, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=dim < HALF, other=0.0)[None, :]
    first = x + token * token_stride + (head * head_stride)[:, None] + dim[None, :]
    inside = (head < num_heads)[:, None] & (dim < HALF)[None, :]
    a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(first, (a * cos - b * sin).to(x.dtype.element_ty), mask=inside)
    tl.store(first + HALF, (b * cos + a * sin).to(x.dtype.element_ty), mask=inside)


def _example(head_dim: int) -> None:
    queries_and_keys = torch.empty(256, 48, head_dim, dtype=torch.bfloat16, device="meta")[:, :40]
    rope(
        queries_and_keys,
        torch.empty(256, dtype=torch.int64, device="meta"),
        torch.empty(8192, head_dim, dtype=torch.float32, device="meta"),
    )


AOT_VARIANTS = [Variant(f"bfloat16, head_dim {head_dim}", _example, {"head_dim": head_dim}) for head_dim in (64, 128)]
