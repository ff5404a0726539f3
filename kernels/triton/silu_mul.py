"""The gate of a SwiGLU MLP (Shazeer 2020, arXiv 2002.05202) on a GPU: silu(gate) * up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.variant import Variant

ELEMENTS = 1024  # of a row, by one program of 4 warps: one 16-byte load of 16-bit gates a thread


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `kernels.silu_mul.silu_mul`; rows of gate_up contiguous."""
    num_tokens, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, intermediate, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _silu_mul_kernel[(num_tokens, triton.cdiv(intermediate, ELEMENTS))](
            out, gate_up, gate_up.stride(0), intermediate, ELEMENTS=ELEMENTS, num_warps=4, enable_fp_fusion=False
        )
    return out


@triton.jit
def _silu_mul_kernel(out, gate_up, row_stride, intermediate, ELEMENTS: tl.constexpr):
    """A program takes ELEMENTS columns of a row: silu in float32, rounded, then the product, as the two operations one by one."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = column < intermediate
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * row_stride + intermediate + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * intermediate + column, (activated * up).to(gate.dtype), mask=inside)


def _example(intermediate: int) -> None:
    silu_mul(torch.empty(256, 2 * intermediate, dtype=torch.bfloat16, device="meta"))


AOT_VARIANTS = [Variant(f"bfloat16, intermediate {size}", _example, {"intermediate": size}) for size in (1536, 14336)]
