"""Matrices of small integers in blocks, each with a scale and a minimum: what GGUF's quantized types have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

INT8_BLOCK = 64  # columns of a weight quantized here that share a scale


@dataclass
class Blocks:
    """Row r, column k is codes[r, k] * scales[r, k // block_size] + minima[r, k // block_size]."""

    codes: NDArray[np.uint8]  # [rows, columns]
    scales: NDArray[np.float32]  # [rows, columns / block_size]
    minima: NDArray[np.float32]
    bits: int  # 4: codes are 0..15; 8: 0..255

    @property
    def block_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def values(self) -> NDArray[np.float32]:
        """[rows, columns] float32."""
        size = self.block_size
        return self.codes * self.scales.repeat(size, axis=1) + self.minima.repeat(size, axis=1)

    def columns(self, begin: int, end: int) -> Blocks:
        """Columns begin..end-1. Raises ValueError where that cuts through a block."""
        size = self.block_size
        if begin % size or end % size:
            raise ValueError(f"columns {begin} to {end} cut through blocks of {size}")
        some = slice(begin // size, end // size)
        return Blocks(self.codes[:, begin:end], self.scales[:, some], self.minima[:, some], self.bits)


def join_rows(parts: Sequence[Blocks]) -> Blocks:
    """One matrix of the rows of all, one after the other, in the largest codes and the smallest blocks among them."""
    size = min(part.block_size for part in parts)
    return Blocks(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales.repeat(part.block_size // size, axis=1) for part in parts]),
        np.concatenate([part.minima.repeat(part.block_size // size, axis=1) for part in parts]),
        max(part.bits for part in parts),
    )


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
    return Blocks(codes.reshape(rows, -1), scales, -128 * scales, bits=8)
