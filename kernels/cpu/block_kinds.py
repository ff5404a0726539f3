"""How quantized blocks lie in memory for the CPU's product: records of a panel's columns, and the code that reads them.

A record holds LANES output columns over the input columns of a block, or of the blocks that share factors. First come the blocks'
codes, then their scales and minima. So a panel, and after it the next, is read as one stream, of few more bytes than the file has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from kernels.cpu.dot import BYTES, WORDS
from kernels.cpu.ir import FLOAT, HALF, INT8, LANES, at, load_as
from kernels.cpu.quantized_blocks import INT8_BLOCK, Blocks

GROUP = 4  # input columns that one instruction multiplies and sums
CHUNK = BYTES.count  # bytes of LANES columns' codes of a group
HALF_BYTES = 2 * LANES  # of LANES float16
_FLOATS = ir.VectorType(FLOAT, LANES)
_NIBBLE = ir.Constant(BYTES, [15] * CHUNK)


@dataclass(frozen=True)
class Kind:
    """A layout of blocks that there is a product for."""

    bits: int  # of a code: 4, 5, 6 or 8
    size: int  # input columns that share a scale
    is_symmetric: bool  # around the middle of the codes' range: no minima are kept
    span: int = 0  # input columns whose scales, and minima, are whole numbers that share a factor; 0: they are float16 themselves
    block: int = 32  # input columns whose activations share a scale

    @property
    def middle_shift(self) -> int:
        """Of the code that stands for zero, the logarithm."""
        return self.bits - 1

    @property
    def groups(self) -> int:
        return self.block // GROUP

    @property
    def parts(self) -> int:
        """Scales of a block of activations."""
        return self.block // self.size

    @property
    def columns(self) -> int:
        """Input columns of a record."""
        return self.span or self.block

    @property
    def blocks(self) -> int:
        """Of a record."""
        return self.columns // self.block

    @property
    def code_bytes(self) -> int:
        """Of a block."""
        return self.block * LANES * self.bits // 8

    @property
    def number_bytes(self) -> int:
        """Of a scale of LANES columns, and of a minimum."""
        return LANES if self.span else HALF_BYTES

    @property
    def minima_offset(self) -> int:
        """Of the first minimum in a record."""
        return self.blocks * (self.code_bytes + self.parts * self.number_bytes)

    @property
    def factors_offset(self) -> int:
        """Of the factors of scales in a record; after them come those of minima."""
        return self.minima_offset + (0 if self.is_symmetric else self.blocks * self.parts * self.number_bytes)

    @property
    def record_bytes(self) -> int:
        num_factors = 0 if not self.span else 1 if self.is_symmetric else 2
        return self.factors_offset + num_factors * HALF_BYTES

    def load_codes(self, builder: ir.IRBuilder, block: ir.Value) -> Iterator[tuple[int, ir.Value]]:
        """Yields (group, codes of the panel's columns as bytes) of the block whose codes begin at `block`."""
        if self.bits == 8:
            for group in range(self.groups):
                yield group, self._line(builder, block, group)
            return
        half = self.groups // 2
        high = self._load_high_bits(builder, block)
        for chunk in range(half):
            raw = self._line(builder, block, chunk)
            yield chunk, high(chunk, builder.and_(raw, _NIBBLE))
            upper = builder.lshr(builder.bitcast(raw, WORDS), ir.Constant(WORDS, [4] * LANES))
            yield chunk + half, high(chunk + half, builder.and_(builder.bitcast(upper, BYTES), _NIBBLE))

    def load_numbers(self, builder: ir.IRBuilder, pointer: ir.Value, factor: ir.Value | None) -> ir.Value:
        """The scales of the panel's columns at `pointer`, or the minima, as float32; `factor` None: they have none."""
        if factor is None:
            return load_halves(builder, pointer)
        numbers = load_as(builder, pointer, ir.VectorType(INT8, LANES), 1)
        return builder.fmul(builder.sitofp(builder.sext(numbers, WORDS), _FLOATS), factor)

    @staticmethod
    def _line(builder, block, number):
        return load_as(builder, at(builder, block, number * CHUNK), BYTES, 1)

    def _load_high_bits(self, builder, block):
        """A function (group, low four bits) -> codes."""
        lines = self.groups // 2  # of low bits
        if self.bits == 5:
            mask, bit = ir.VectorType(ir.IntType(1), CHUNK), ir.Constant(BYTES, [16] * CHUNK)
            begin = at(builder, block, lines * CHUNK)

            def add_bit(group, low):
                bits = load_as(builder, at(builder, begin, group * CHUNK // 8), ir.IntType(CHUNK), 1)
                return builder.select(builder.bitcast(bits, mask), builder.or_(low, bit), low)

            return add_bit
        if self.bits == 6:
            pairs = [builder.bitcast(self._line(builder, block, lines + i), WORDS) for i in range(self.groups // 4)]
            both = ir.Constant(BYTES, [0x30] * CHUNK)

            def add_pair(group, low):
                shift = 4 - 2 * (group % 4)
                move = builder.shl if shift > 0 else builder.lshr
                moved = move(pairs[group // 4], ir.Constant(WORDS, [abs(shift)] * LANES)) if shift else pairs[group // 4]
                return builder.or_(low, builder.and_(builder.bitcast(moved, BYTES), both))

            return add_pair
        return lambda group, low: low


def load_halves(builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
    """LANES float16 as float32."""
    return builder.fpext(load_as(builder, pointer, ir.VectorType(HALF, LANES), 2), _FLOATS)


KINDS = (
    Kind(4, 32, True),  # Q4_0
    Kind(4, 32, False),  # Q4_1
    Kind(5, 32, True),  # Q5_0
    Kind(5, 32, False),  # Q5_1
    Kind(8, 32, True),  # Q8_0
    Kind(4, 32, False, span=256),  # Q4_K
    Kind(5, 32, False, span=256),  # Q5_K
    Kind(6, 16, True, span=256),  # Q6_K
    Kind(8, INT8_BLOCK, True, block=INT8_BLOCK),
)


def find_kind(blocks: Blocks) -> int:
    """Index in KINDS. Raises ValueError where there is no product for such blocks."""
    for number, kind in enumerate(KINDS):
        if (kind.bits, kind.size, kind.span, kind.is_symmetric) == blocks.layout:
            return number
    raise ValueError(f"there is no product with blocks of {blocks.block_size} columns and {blocks.bits} bits")


def pack_records(blocks: Blocks, kind: Kind) -> NDArray[np.uint8]:
    """[panels, records of a panel, record_bytes]; rows are filled up with zeros to whole panels."""
    rows, columns = blocks.codes.shape
    panels, records = -(-rows // LANES), columns // kind.columns
    parts = [_pack_codes(_pad_rows(blocks.codes, panels), kind).reshape(panels, records, -1)]
    both = [blocks.scales] if blocks.minima is None else [blocks.scales, blocks.minima]
    parts += [_pack_numbers(each.numbers, panels, records, np.int8 if kind.span else np.float16) for each in both]
    parts += [_pack_numbers(each.factors, panels, records, np.float16) for each in both if each.factors is not None]
    packed = np.concatenate(parts, axis=2)
    assert packed.shape[2] == kind.record_bytes
    return packed


def _pad_rows(x: NDArray[Any], panels: int) -> NDArray[Any]:
    missing = panels * LANES - len(x)
    return np.pad(x, ((0, missing), (0, 0))) if missing else x


def _pack_codes(codes: NDArray[np.uint8], kind: Kind) -> NDArray[np.uint8]:
    """[panels * LANES, columns] to [panels, blocks, bytes of a block's codes]."""
    panels, blocks = len(codes) // LANES, codes.shape[1] // kind.block
    lines = codes.reshape(panels, LANES, blocks, kind.groups, GROUP).transpose(0, 2, 3, 1, 4).reshape(panels, blocks, -1, CHUNK)
    if kind.bits == 8:
        return lines.reshape(panels, blocks, -1)
    half = kind.groups // 2
    packed: list[NDArray[Any]] = [(lines[:, :, :half] & 15) | (lines[:, :, half:] << 4)]
    if kind.bits == 5:
        packed.append(np.packbits(lines >> 4, axis=3, bitorder="little"))
    elif kind.bits == 6:
        quads = (lines >> 4).reshape(panels, blocks, -1, 4, CHUNK)
        packed.append(quads[:, :, :, 0] | quads[:, :, :, 1] << 2 | quads[:, :, :, 2] << 4 | quads[:, :, :, 3] << 6)
    return np.concatenate([part.reshape(panels, blocks, -1) for part in packed], axis=2)


def _pack_numbers(numbers: NDArray[np.float32], panels: int, records: int, dtype: type[np.generic]) -> NDArray[np.uint8]:
    """[rows, n] of `Scales` to the bytes that a record has of them, [panels, records, n / records * LANES * size]."""
    kept = _pad_rows(numbers, panels).astype(dtype)
    if not np.array_equal(kept[: len(numbers)].astype(np.float32), numbers, equal_nan=True):
        raise ValueError("scales have more bits than their layout keeps")
    columns = kept.reshape(panels, LANES, records, -1).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(columns).reshape(panels, records, -1).view(np.uint8)
