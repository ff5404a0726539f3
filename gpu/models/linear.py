"""Matrix products of a model, by numeric class: what weights and activations are rounded to.

A class fixes values; which kernel computes them is free as long as only the order of summation differs. The CPU's own kernels, for
16-bit weights and for blocks of small integers, make a row's result depend on that row alone: the same bits in every batch.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from gpu.checkpoint.packed_matrix import PackedMatrix
from gpu.numerics import Numerics
from kernels.cpu.bfloat_matmul import bfloat_matmul, bfloat_rows
from kernels.cpu.block_matmul import PackedBlocks, block_matmul, block_rows
from kernels.cpu.half_matmul import half_matmul, half_rows
from kernels.cpu.quantized_blocks import quantize

_NO_SEGMENTS = np.zeros((0, 0), np.int64)  # of panels, which are all of one kind


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
    if packed.kind == "blocks":
        return BlockLinear(packed, bias)
    return PanelLinear(packed, bias)


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


class PanelLinear:
    """16-bit weights, float32 in, out and between: half the bytes of float32, faster than it at every batch size.

    With bfloat16 the product rounds its rows too, and takes half the time of float16 where processors multiply it.
    """

    _KERNELS: ClassVar = {"half": (half_matmul, half_rows), "bfloat": (bfloat_matmul, bfloat_rows)}  # by the packed matrix's kind

    def __init__(self, packed: PackedMatrix, bias: torch.Tensor | None) -> None:
        self._multiply, self._take_rows = self._KERNELS[packed.kind]
        self._panels = packed.arrays["panels"]
        self._in_features, self._out_features = packed.in_features, packed.out_features
        self._bias = bias
        self.is_compilable = bias is None
        self.operands = (self._panels, _NO_SEGMENTS)
        self.num_bytes = packed.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _add(self._multiply(x, self._panels, self._out_features), self._bias)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        return self._take_rows(self._panels, indices)[:, : self._in_features].contiguous()


class BlockLinear:
    """Weights of 4 or 8 bits in blocks, activations of 8 bits in the same blocks, each with its scale; float32 in and out."""

    def __init__(self, packed: PackedMatrix, bias: torch.Tensor | None) -> None:
        self._blocks = PackedBlocks(packed.arrays["records"], packed.arrays["segments"])
        self._in_features = packed.in_features
        self._bias = bias
        self.is_compilable = bias is None and self._in_features == self._blocks.in_features
        self.operands = (self._blocks.records, self._blocks.segments)
        self.num_bytes = self._blocks.records.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _add(block_matmul(x, self._blocks), self._bias)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        return block_rows(self._blocks, indices)[:, : self._in_features].contiguous()


# `operands`: as kernels.cpu.layer.project takes them, where the layer `is_compilable`.
PackedLinear = PanelLinear | BlockLinear


def _add(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return product if bias is None else product.add_(bias)
