"""Matrix products of a model, by numeric class: what weights and activations are rounded to.

A class fixes values; which kernel computes them is free as long as only the order of summation differs. On the CPU the classes
float16 and int8 have kernels in which a row's result depends on that row alone: the same bits in every batch.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels.row_scale import hadamard, hadamard_order, scale_rows, to_range

_CHUNK_ROWS = 120  # FBGEMM's float16 product takes so many rows at once
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Numerics:
    """A numeric class. Matrices are `weights`, unless quantized; what flows between layers is `activations`."""

    weights: torch.dtype
    activations: torch.dtype
    quantization: str = "none"

    @classmethod
    def choose(cls, dtype: str, quantization: str, device: torch.device) -> Numerics:
        """For the options --dtype and --quantization."""
        on_cpu = device.type == "cpu"
        if quantization != "none" and not on_cpu:
            raise ValueError(f"--quantization {quantization} is for the CPU; this engine runs on {device.type}")
        if dtype == "auto":
            dtype = "float16" if on_cpu else "bfloat16"
        weights = DTYPES[dtype]
        wide = on_cpu and (weights is torch.float16 or quantization != "none")  # CPUs convert as they load, and sum in float32
        return cls(weights, torch.float32 if wide else weights, quantization)

    @property
    def packed(self) -> bool:
        """Matrices are kept in a kernel's own layout."""
        return self.quantization != "none" or self.weights is not self.activations

    def __str__(self) -> str:
        name = str(self.weights).removeprefix("torch.")
        return name if self.quantization == "none" else f"{self.quantization}{'' if has_wide_sums() else '-narrow'}-{name}"


class Linear(Protocol):
    """x [rows, in_features] -> [rows, out_features], in the class's activations."""

    num_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, numerics: Numerics) -> Linear:
    """weight [out_features, in_features], bias [out_features], both in `numerics.weights`."""
    if numerics.quantization == "int8":
        return Int8Linear(weight, bias)
    if numerics.packed:
        return Float16Linear(weight, bias)
    return PlainLinear(weight, bias)


class PlainLinear:
    """Weights and activations of one type, by torch's own product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.num_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Float16Linear:
    """float16 weights, float32 activations and sums (FBGEMM): half the bytes of float32, faster than it at every batch size."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())
        self.num_bytes = 2 * weight.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        padding = _padding()[rows % _CHUNK_ROWS]
        if padding:
            return torch.ops.quantized.linear_dynamic_fp16(F.pad(x, (0, 0, 0, padding)), self._packed)[:rows]
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)


@cache
def _padding() -> list[int]:
    """How many rows FBGEMM needs more than a remainder of 0.._CHUNK_ROWS-1, so that all get the bits that they get in a full chunk.

    It cuts the rows of a chunk into strips, and strips of one or two rows have a kernel of their own on AVX2, which sums in
    another order. Found by trying.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_CHUNK_ROWS, 600, generator=generator)  # more than FBGEMM takes of a row at once
    packed = torch.ops.quantized.linear_prepack_fp16(torch.randn(64, 600, generator=generator), None)
    full = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    good = [
        rows
        for rows in range(1, _CHUNK_ROWS + 1)
        if torch.equal(torch.ops.quantized.linear_dynamic_fp16(x[:rows], packed), full[:rows])
    ]
    return [next(rows for rows in [0, *good] if rows >= wanted) - wanted for wanted in range(_CHUNK_ROWS)]


class Int8Linear:
    """8-bit weights with a scale an output channel, 8-bit activations with a scale a row, float32 in and out.

    Sums are integers, exact in any order. Where the processor has no instruction that sums products of 8 bits in 32 (VNNI), FBGEMM
    adds two neighbours' in 16 bits, which saturate: there a channel's scale leaves them room, which makes another numeric class.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        weight = hadamard(weight.float()) / hadamard_order(weight.shape[1])
        largest = weight.abs().amax(dim=1)
        if not has_wide_sums():  # 255 * (127 + rounding) is below 2**15
            pairs = F.pad(weight, (0, weight.shape[1] % 2)).abs().unflatten(1, (-1, 2)).sum(dim=2)
            largest = torch.maximum(largest, pairs.amax(dim=1))
        scales = largest.clamp(min=1e-30) / 127
        integers = (weight / scales.unsqueeze(1)).round_().to(torch.int8)
        self._packed = _pack_int8(integers, scales)
        self.bias = None if bias is None else bias.float()
        self.num_bytes = weight.numel() + scales.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scaled, factors = to_range(x.contiguous(), 127.0)
        product = _multiply_int8(scaled, self._packed)
        scale_rows(product, factors, self.bias)
        return product


def _pack_int8(integers: torch.Tensor, scales: torch.Tensor) -> torch.ScriptObject:
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    with warnings.catch_warnings():  # quantized tensors are to leave torch; FBGEMM's packing takes nothing else
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        return torch.ops.quantized.linear_prepack(torch._make_per_channel_quantized_tensor(integers, scales, zeros, 0), None)


def _multiply_int8(x: torch.Tensor, packed: torch.ScriptObject) -> torch.Tensor:
    """x, rounded to -128..127, times the weights; one scale and zero point for whatever x holds."""
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, 1.0, 128, packed)


@cache
def has_wide_sums() -> bool:
    """Whether products of 8 bits are summed exactly, found by trying the largest."""
    packed = _pack_int8(torch.full((16, 64), 127, dtype=torch.int8), torch.ones(16))
    return bool((_multiply_int8(torch.full((16, 64), 127.0), packed) == 127.0 * 127.0 * 64).all())
