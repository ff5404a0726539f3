"""Matrix products of a model, by numeric class: what weights and activations are rounded to.

A class fixes values; which kernel computes them is free as long as only the order of summation differs. The CPU's own kernels, for
16-bit weights and for blocks of small integers, make a row's result depend on that row alone: the same bits in every batch.
"""

from __future__ import annotations

import functools
from typing import ClassVar, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from gpu.checkpoint.packed_matrix import PackedMatrix
from gpu.numerics import Numerics
from kernels.cpu.bfloat_matmul import bfloat_rows
from kernels.cpu.block_matmul import PackedBlocks
from kernels.cpu.block_rows import block_rows
from kernels.cpu.half_matmul import half_rows
from kernels.cpu.project import PackedWeight, matmul
from kernels.cpu.quantized_blocks import quantize


class Linear(Protocol):
    num_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features], in the class's activations."""

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows `indices` [n] int64 of the weight: [n, in_features], in the class's activations."""


def pack(weight: torch.Tensor, numerics: Numerics) -> PackedMatrix:
    """weight [out_features, in_features] of any float type as the class keeps it."""
    if numerics.quantization == "int8":
        return PackedMatrix.blocks([quantize(weight.float().numpy())], weight.shape[1])
    if numerics.packed and numerics.weights is torch.float16:
        return PackedMatrix.half(weight)
    if numerics.packed and numerics.weights is torch.bfloat16:
        return PackedMatrix.bfloat(weight)
    return PackedMatrix.plain(weight.to(numerics.weights))


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, numerics: Numerics) -> Linear:
    """The product with weight [out_features, in_features], plus bias [out_features], on weight's device."""
    return open_linear(pack(weight.cpu(), numerics), bias, numerics, weight.device)


def open_linear(packed: PackedMatrix, bias: torch.Tensor | None, numerics: Numerics, device: torch.device) -> Linear:
    """The product with a packed matrix, plus bias [out_features]."""
    if packed.kind == "plain":
        return PlainLinear(packed.tensor().to(device), bias, numerics.activations)
    return PackedLinear(packed, bias)


class PlainLinear:
    """Weights and activations of one type, by torch's own product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, activations: torch.dtype | None = None) -> None:
        self.activations = activations or weight.dtype
        self.weight = weight
        self.bias = bias
        self.num_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        return F.embedding(indices, self.weight).to(self.activations)


class PackedLinear:
    """Weights of 16 bits, or of 4 to 8 in blocks with scales, float32 in and out; `kernels.cpu.project` says what is rounded."""

    _ROWS: ClassVar = {"half": half_rows, "bfloat": bfloat_rows}  # by the packed matrix's kind

    def __init__(self, packed: PackedMatrix, bias: torch.Tensor | None) -> None:
        self._in_features, self._bias = packed.in_features, bias
        if packed.kind == "blocks":
            blocks = PackedBlocks(packed.arrays["records"], packed.arrays["segments"])
            self._weight = PackedWeight(blocks.records, blocks.out_features, blocks.in_features, blocks.segments)
            self._take_rows = functools.partial(block_rows, blocks)
        else:
            self._weight = PackedWeight(packed.arrays["panels"], packed.out_features, packed.in_features)
            self._take_rows = functools.partial(self._ROWS[packed.kind], packed.arrays["panels"])
        self.num_bytes = self._weight.packed.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = matmul(x, self._weight)
        return product if self._bias is None else product.add_(self._bias)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        return self._take_rows(indices)[:, : self._in_features].contiguous()

    @property
    def is_compilable(self) -> bool:
        """Whether the product is `kernels.cpu.project.project` of the description and nothing else."""
        return self._bias is None and self._in_features == self._weight.in_features

    @property
    def description(self) -> NDArray[np.int64]:
        """For `kernels.cpu.project.project`."""
        return self._weight.description
