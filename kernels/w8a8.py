"""Linear layers with weights and activations in 8 bits: int8, or on GPUs from sm_90 on also float8 e4m3.

A weight has one scale an output channel, an activation one a row, made from that row alone (dynamic, symmetric quantization per
token; Xiao et al. 2022, SmoothQuant, arXiv 2211.10438). Scales are applied to the sum of products.

No model calls it yet: it is for FP8 and int8 checkpoints on GPUs.
"""

from __future__ import annotations

import torch

from kernels import device, reference


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, columns] floating point; dtype torch.int8 or torch.float8_e4m3fn.

    Returns (q [rows, columns] of dtype, scales [rows] float32) with x close to q * scales: a row's largest magnitude becomes 127 or
    448; int8 is rounded to the nearest, ties to even. A row of zeros has scale 0, one with NaN or infinity scale NaN.
    """
    if device.on_accelerator(x):
        return device.accelerated("w8a8", "quantize_rows")(x, dtype)
    return reference.quantize_rows(x, dtype)


def linear_w8a8(
    x: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [rows, in_features] floating point, any row stride; weight [out_features, in_features] int8 or float8_e4m3fn;
    weight_scales [out_features] float32; bias [out_features]. Returns [rows, out_features] of x's dtype.

    Sums of int8 products are exact: a row's answer has the same bits in every batch.
    """
    if device.on_accelerator(x):
        return device.accelerated("w8a8", "linear_w8a8")(x, weight, weight_scales, bias)
    return reference.linear_w8a8(x, weight, weight_scales, bias)
