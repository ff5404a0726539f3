"""A tile of the product with quantized blocks, as code of LLVM: a few rows times a panel of weights, block after block."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.block_kinds import KINDS, Kind, load_halves
from kernels.cpu.dot import WORDS, dot_bytes
from kernels.cpu.ir import (
    FLOAT,
    INT32,
    LANES,
    LINE,
    at,
    int64,
    integers,
    load_as,
    multiply_add,
    pointers,
    prefetch,
    splat,
    store,
    switch,
)
from kernels.cpu.rounded_rows import BESIDE, FIRST, SCALE, SECOND, SUM, TOTAL
from kernels.cpu.tiles import BLOCK_ROWS

_FLOATS = ir.VectorType(FLOAT, LANES)
_Products = list[list[Any]]  # [parts][rows] vectors of integers


@intrinsic(prefer_literal=True)
def multiply_tile(typing_context, kind, rows, out, place, stride, x, first_word, records, offset, num_records, ahead, step, lines):
    """A panel's product of `rows` rows, whose words begin at x[first_word], goes to out[place + r * stride + c].

    `out`, `x`, `records` are flat; the panel's `num_records` records of kind KINDS[kind] begin at records[offset]. While block b of
    the panel goes by, `lines` cache lines are asked for from records[ahead + b * step] on.
    """

    def generate(context, builder, signature, arguments):
        out_data, x_data, record_data = pointers(context, builder, signature, arguments, (2, 5, 7))
        num_rows, start, stride_value, x_start = integers(context, builder, signature, arguments, (1, 3, 4, 6))
        first_byte, count, first_ahead, step_ahead, num_lines = integers(context, builder, signature, arguments, (8, 9, 10, 11, 12))
        tile = at(builder, x_data, x_start)
        panel = at(builder, record_data, first_byte)
        far = at(builder, record_data, first_ahead)

        def emit(kind, height):
            totals = [cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, None)) for _ in range(height)]
            with cgutils.for_range(builder, count) as loop:
                record = at(builder, panel, builder.mul(loop.index, int64(kind.record_bytes)))
                for block in _blocks(builder, kind, height, tile, record, loop.index):
                    _ask_ahead(builder, far, block.index, step_ahead, num_lines)
                    _add_block(block, totals)
            for r in range(height):
                store(builder, out_data, builder.add(start, builder.mul(stride_value, int64(r))), builder.load(totals[r]))

        switch(builder, num_rows, range(1, BLOCK_ROWS + 1), functools.partial(emit, KINDS[kind.literal_value]))
        return context.get_dummy_value()

    arguments = (kind, rows, out, place, stride, x, first_word, records, offset, num_records, ahead, step, lines)
    return types.none(*arguments), generate


class _Block(NamedTuple):
    """A block of a panel's record, and the block of the tile's rows that it is multiplied with."""

    builder: ir.IRBuilder
    kind: Kind
    height: int  # rows of the tile
    words: ir.Value  # of the rows, as `rounded_rows` packs them
    record: ir.Value
    factors: Sequence[ir.Value]  # of scales, and of minima; empty: they have none
    index: ir.Value  # of the block in its panel
    place: ir.Value  # of the block in its record

    def at_line(self, row: int, line: int) -> ir.Value:
        """Lines of words: the codes of each group, then BESIDE numbers."""
        return at(self.builder, self.words, line * self.height + row)

    def integer(self, row: int, line: int) -> ir.Value:
        return splat(self.builder, load_as(self.builder, self.at_line(row, line), INT32, 4), WORDS)

    def number(self, row: int, which: int) -> ir.Value:
        pointer = self.builder.bitcast(self.at_line(row, self.kind.groups + which), FLOAT.as_pointer())
        return splat(self.builder, self.builder.load(pointer), _FLOATS)


def _blocks(builder: ir.IRBuilder, kind: Kind, height: int, tile: ir.Value, record: ir.Value, number: ir.Value) -> Iterator[_Block]:
    """Yields once for all blocks of the panel's record of this `number`: code made meanwhile runs for each of them."""
    stride = int64((kind.groups + BESIDE) * height)
    if not kind.span:
        yield _Block(builder, kind, height, at(builder, tile, builder.mul(number, stride)), record, (), number, int64(0))
        return
    places = range(kind.factors_offset, kind.record_bytes, 2 * LANES)
    factors = [load_halves(builder, at(builder, record, place)) for place in places]
    first = builder.mul(number, int64(kind.blocks))
    with cgutils.for_range(builder, int64(kind.blocks)) as loop:
        index = builder.add(first, loop.index)
        words = at(builder, tile, builder.mul(index, stride))
        yield _Block(builder, kind, height, words, record, factors, index, loop.index)


def _ask_ahead(builder: ir.IRBuilder, far: ir.Value, index: ir.Value, step: ir.Value, num_lines: ir.Value) -> None:
    """Asks for the cache lines that go with block `index` of a panel."""
    with cgutils.for_range(builder, num_lines) as loop:
        line = builder.add(builder.mul(index, step), builder.mul(loop.index, int64(LINE)))
        prefetch(builder, at(builder, far, line))


def _add_block(block: _Block, totals: Sequence[ir.Value]) -> None:
    """totals[row] += the block's product with each row."""
    products = _begin_products(block)
    _add_codes(block, products)
    for part in range(block.kind.parts):
        _add_part(block, part, products[part], totals)


def _begin_products(block: _Block) -> _Products:
    """Zeros, or what codes around a middle have too much."""
    builder, kind, height = block.builder, block.kind, block.height
    if not kind.is_symmetric:
        return [[ir.Constant(WORDS, None)] * height for _ in range(kind.parts)]
    sums = (TOTAL,) if kind.parts == 1 else (FIRST, SECOND)
    products = [[block.integer(r, kind.groups + which) for r in range(height)] for which in sums]
    if kind.parts > 1:
        return products
    shift = ir.Constant(WORDS, [kind.middle_shift] * LANES)
    return [[builder.shl(each, shift) for each in products[0]]]


def _add_codes(block: _Block, products: _Products) -> None:
    builder, kind = block.builder, block.kind
    codes = at(builder, block.record, builder.mul(block.place, int64(kind.code_bytes)))
    for group, columns in kind.load_codes(builder, codes):
        some = products[group * kind.parts // kind.groups]
        for r in range(block.height):
            some[r] = dot_bytes(builder, some[r], columns, block.integer(r, group), kind.bits)


def _add_part(block: _Block, part: int, products: Sequence[Any], totals: Sequence[ir.Value]) -> None:
    """The columns that share a scale: totals[row] += scale * products[row] + minimum * sum of the row."""
    builder, kind, record, factors = block.builder, block.kind, block.record, block.factors
    place = builder.mul(builder.add(builder.mul(block.place, int64(kind.parts)), int64(part)), int64(kind.number_bytes))
    scales = at(builder, record, builder.add(place, int64(kind.blocks * kind.code_bytes)))
    scale = kind.load_numbers(builder, scales, factors[0] if factors else None)
    minimum = None
    if not kind.is_symmetric:
        minima = at(builder, record, builder.add(place, int64(kind.minima_offset)))
        minimum = kind.load_numbers(builder, minima, factors[1] if factors else None)
    for r in range(block.height):
        total = builder.load(totals[r])
        if minimum is not None:
            total = multiply_add(builder, minimum, block.number(r, SUM), total)
        exact = builder.sitofp(products[r], _FLOATS)
        scaled = builder.fmul(scale, block.number(r, SCALE))
        builder.store(multiply_add(builder, exact, scaled, total), totals[r])
