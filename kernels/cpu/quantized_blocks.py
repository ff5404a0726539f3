"""Matrices of small integers in blocks, each with a scale and perhaps a minimum: what GGUF's quantized types have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

INT8_BLOCK = 64  # columns of a weight quantized here that share a scale


@dataclass
class Scales:
    """A number for each block of a row; where there are factors, times the one of the blocks around it.

    Without factors the numbers are float16. With factors they are whole, -128..127, and the factors are float16.
    """

    numbers: NDArray[np.float32]  # [rows, blocks of a row]
    factors: NDArray[np.float32] | None = None  # [rows, factors of a row]

    def values(self) -> NDArray[np.float32]:
        """[rows, blocks of a row] float32, exactly."""
        if self.factors is None:
            return self.numbers
        return self.numbers * self.factors.repeat(self.numbers.shape[1] // self.factors.shape[1], axis=1)

    def cut(self, begin: int, end: int, total: int) -> Scales:
        """Those of columns begin..end-1 of `total`, which cut through nothing."""

        def part(x: NDArray[np.float32]) -> NDArray[np.float32]:
            return x[:, begin * x.shape[1] // total : end * x.shape[1] // total]

        return Scales(part(self.numbers), None if self.factors is None else part(self.factors))


@dataclass
class Blocks:
    """Row r, column k is (codes[r, k] - middle) * scale + minimum, of the block that holds column k."""

    codes: NDArray[np.uint8]  # [rows, columns]
    bits: int  # of a code: 4, 5, 6 or 8
    scales: Scales
    minima: Scales | None = None  # None: codes stand for numbers around zero

    @property
    def middle(self) -> int:
        """The code that stands for zero where there are no minima."""
        return 1 << (self.bits - 1) if self.minima is None else 0

    @property
    def block_size(self) -> int:
        """Columns that share a scale."""
        return self.codes.shape[1] // self.scales.numbers.shape[1]

    @property
    def span(self) -> int:
        """Columns that share a factor of their scales; 0 where scales have none."""
        return 0 if self.scales.factors is None else self.codes.shape[1] // self.scales.factors.shape[1]

    def values(self) -> NDArray[np.float32]:
        """[rows, columns] float32."""
        values = (self.codes.astype(np.float32) - np.float32(self.middle)) * self.scales.values().repeat(self.block_size, axis=1)
        if self.minima is not None:
            values += self.minima.values().repeat(self.block_size, axis=1)
        return values

    def columns(self, begin: int, end: int) -> Blocks:
        """Columns begin..end-1. Raises ValueError where that cuts through a block, or through blocks that share a factor."""
        size, total = self.span or self.block_size, self.codes.shape[1]
        if begin % size or end % size:
            raise ValueError(f"columns {begin} to {end} cut through blocks of {size}")
        scales, minima = (x if x is None else x.cut(begin, end, total) for x in (self.scales, self.minima))
        assert scales is not None
        return Blocks(self.codes[:, begin:end], self.bits, scales, minima)

    @property
    def layout(self) -> tuple[int, int, int, bool]:
        """Equal for matrices whose rows may be joined."""
        return self.bits, self.block_size, self.span, self.minima is None


def join_rows(parts: Sequence[Blocks]) -> list[Blocks]:
    """The rows of all, one after the other, as few matrices as their layouts allow."""
    joined: list[Blocks] = []
    for part in parts:
        if joined and joined[-1].layout == part.layout:
            joined[-1] = _concatenate(joined[-1], part)
        else:
            joined.append(part)
    return joined


def _concatenate(first: Blocks, second: Blocks) -> Blocks:
    def scales(a: Scales | None, b: Scales | None) -> Scales | None:
        if a is None or b is None:
            return None
        factors = None if a.factors is None or b.factors is None else np.concatenate([a.factors, b.factors])
        return Scales(np.concatenate([a.numbers, b.numbers]), factors)

    both = scales(first.scales, second.scales)
    assert both is not None
    return Blocks(np.concatenate([first.codes, second.codes]), first.bits, both, scales(first.minima, second.minima))


def zeros_like(blocks: Blocks, num_rows: int) -> Blocks:
    """`num_rows` rows of zeros of the same layout."""

    def zeros(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.zeros((num_rows, x.shape[1]), np.float32)

    def empty(scales: Scales) -> Scales:
        return Scales(zeros(scales.numbers), None if scales.factors is None else zeros(scales.factors))

    codes = np.full((num_rows, blocks.codes.shape[1]), blocks.middle, np.uint8)
    return Blocks(codes, blocks.bits, empty(blocks.scales), None if blocks.minima is None else empty(blocks.minima))


def quantize(weight: NDArray[np.float32]) -> Blocks:
    """weight [rows, columns] in blocks of INT8_BLOCK: nearest, symmetrical around 0, scales of 16 bits, as in GGUF's Q8_0.

    The last block of a row is filled up with zeros.
    """
    rows, columns = weight.shape
    padded = np.zeros((rows, -(-columns // INT8_BLOCK), INT8_BLOCK), np.float32)
    padded.reshape(rows, -1)[:, :columns] = weight
    scales = (np.abs(padded).max(axis=2) / 127).astype(np.float16).astype(np.float32)
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    padded *= inverse[:, :, np.newaxis]
    codes = (np.clip(np.rint(padded, out=padded), -127, 127) + 128).astype(np.uint8)
    return Blocks(codes.reshape(rows, -1), 8, Scales(scales))
