"""A matrix in the layout that its kernel reads: arrays without a process's own addresses, which a file can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.cpu.bfloat_matmul import pack_bfloat
from kernels.cpu.block_matmul import pack_blocks
from kernels.cpu.half_matmul import pack_half
from kernels.cpu.quantized_blocks import Blocks


@dataclass(frozen=True)
class PackedMatrix:
    """kind: plain (array `weight`), half or bfloat (`panels`, kernels.cpu.half_matmul and bfloat_matmul) or blocks (`records`,
    `segments`, kernels.cpu.block_matmul)."""

    kind: str
    out_features: int
    in_features: int
    arrays: dict[str, np.ndarray]
    dtype: str = ""  # plain: torch's name of the weight's type; bfloat16 is kept as int16

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def tensor(self) -> torch.Tensor:
        """The weight of a plain matrix, in the same memory."""
        return torch.from_numpy(self.arrays["weight"]).view(getattr(torch, self.dtype))

    @classmethod
    def plain(cls, weight: torch.Tensor) -> PackedMatrix:
        kept = weight.view(torch.int16) if weight.dtype is torch.bfloat16 else weight
        name = str(weight.dtype).removeprefix("torch.")
        return cls("plain", weight.shape[0], weight.shape[1], {"weight": kept.numpy()}, dtype=name)

    @classmethod
    def half(cls, weight: torch.Tensor) -> PackedMatrix:
        return cls("half", weight.shape[0], weight.shape[1], {"panels": pack_half(weight.half())})

    @classmethod
    def bfloat(cls, weight: torch.Tensor) -> PackedMatrix:
        return cls("bfloat", weight.shape[0], weight.shape[1], {"panels": pack_bfloat(weight.bfloat16())})

    @classmethod
    def blocks(cls, matrices: Sequence[Blocks], in_features: int) -> PackedMatrix:
        """The rows of all matrices, one after the other."""
        packed = pack_blocks(matrices)
        return cls("blocks", packed.out_features, in_features, {"records": packed.records, "segments": packed.segments})
