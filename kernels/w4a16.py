"""Linear layers with weights of 4 bits in groups that share a scale and a zero point, and activations of 16 (or 32) bits.

A byte holds two weights of one group: column j of the group's first half in the low nibble, column j of its second half in the high
one (as GGML's 4-bit blocks have it). So each half of a group is unpacked by one shift and needs no interleaving.

No model calls it yet: it is for AWQ and GPTQ checkpoints on GPUs.
"""

from __future__ import annotations

import torch

from kernels import device, reference


def pack_int4(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """values [out_features, in_features] of 0..15, any integer dtype, in_features a multiple of the even group_size;
    returns [out_features, in_features // 2] uint8."""
    halves = values.to(torch.uint8).unflatten(1, (-1, 2, group_size // 2))
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def unpack_int4(packed: torch.Tensor, group_size: int) -> torch.Tensor:
    """The inverse of `pack_int4`: [out_features, in_features] uint8."""
    grouped = packed.unflatten(1, (-1, group_size // 2))
    return torch.stack((grouped & 15, grouped >> 4), dim=2).flatten(1)


def linear_w4a16(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x times the transposed weight (value - zero) * scale, which is rounded to x's dtype; sums are float32.

    x       [rows, in_features] floating point, any row stride
    packed  [out_features, in_features // 2] uint8, by `pack_int4`
    scales  [in_features // group_size, out_features] floating point; its shape tells the group size, a multiple of 32
    zeros   as scales; need not be whole numbers; 8 where None
    bias    [out_features]
    Returns [rows, out_features] of x's dtype.
    """
    if device.on_accelerator(x):
        return device.accelerated("w4a16", "linear_w4a16")(x, packed, scales, zeros, bias)
    return reference.linear_w4a16(x, packed, scales, zeros, bias)
