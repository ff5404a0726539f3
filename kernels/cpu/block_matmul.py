"""Product of float32 rows with quantized weights as they are, on the CPU: codes of 4 to 8 bits in blocks that share a scale.

A row's activations are rounded to 8 bits in blocks of their own, each with a scale, so that an outlier costs its block alone its
precision. Products of a block are summed in integers, exactly, blocks in float32 in a fixed order: the same bits on every
processor, whatever instruction multiplies bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from kernels.cpu.block_kinds import KINDS, find_kind, pack_records
from kernels.cpu.block_tile import multiply_tile
from kernels.cpu.compiled import compiled
from kernels.cpu.crew import CHUNK_BYTES, OPERANDS, make_task, pointer_to, share
from kernels.cpu.ir import LINE
from kernels.cpu.quantized_blocks import Blocks
from kernels.cpu.rounded_rows import BESIDE
from kernels.cpu.tiles import BLOCK_PANEL, BLOCK_ROWS, copy_tile, tile_rows

PANEL = BLOCK_PANEL

# What one row reads of the weights comes from memory: so far ahead it is asked for, in bytes. The processor itself looks ahead too,
# but neither across pages nor while it is busy with a row's products.
AHEAD = 4096

# Columns of `segments`: parts of a matrix that are of one kind.
_KIND, _FIRST_PANEL, _FIRST_COLUMN, _END_COLUMN, _OFFSET, _RECORDS = range(6)
SEGMENT_FIELDS = 6

# Operands of the task, on the board.
_OUT, _ROWS, _COLUMNS, _X, _RECORDS_AT, _NUM_RECORDS, _FROM, _TO = range(OPERANDS, OPERANDS + 8)

_RECORD_BYTES = tuple(kind.record_bytes for kind in KINDS)


@dataclass
class PackedBlocks:
    """Matrices of blocks, one's rows after the other's, as the product reads them."""

    records: NDArray[np.uint8]  # flat: segment after segment, panel after panel
    segments: NDArray[np.int64]  # [matrices, 6]

    @property
    def out_features(self) -> int:
        return int(self.segments[-1, _END_COLUMN])

    @property
    def in_features(self) -> int:
        return int(self.segments[0, _RECORDS]) * KINDS[int(self.segments[0, _KIND])].columns


def pack_blocks(matrices: Sequence[Blocks]) -> PackedBlocks:
    """Matrices of equal width. Raises ValueError where there is no kernel for such blocks."""
    records, segments, panel, column, offset = [], [], 0, 0, 0
    for blocks in matrices:
        number = find_kind(blocks)
        packed = pack_records(blocks, KINDS[number])
        end_column = column + len(blocks.codes)
        segments.append((number, panel, column, end_column, offset, packed.shape[1]))
        records.append(packed.reshape(-1))
        panel, column, offset = panel + len(packed), end_column, offset + packed.size
    if len({KINDS[segment[_KIND]].block for segment in segments}) > 1:
        raise ValueError("there is no product of rows with blocks of different width")
    return PackedBlocks(np.concatenate(records) if len(records) > 1 else records[0], np.array(segments, np.int64))


def _make_task(kind: int) -> int:
    """A kind has code of its own, so that a model compiles that of the kinds which it has."""
    record_bytes, record_blocks = KINDS[kind].record_bytes, KINDS[kind].blocks
    block_words = KINDS[kind].groups + BESIDE

    def multiply(board, begin, end):
        """Panels begin..end-1 of a segment of a product; x as `quantize_rows` packs it."""
        rows, columns, first_column, end_column = board[_ROWS], board[_COLUMNS], board[_FROM], board[_TO]
        flat = carray(pointer_to(board[_OUT], np.float32), (rows * columns,))
        x = carray(pointer_to(board[_X], np.int32), (1,))
        records = carray(pointer_to(board[_RECORDS_AT], np.uint8), (1,))
        scratch = np.empty((BLOCK_ROWS, PANEL), np.float32)
        out, flat_scratch = flat.reshape(rows, columns), scratch.reshape(-1)
        tiles = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
        num_records = board[_NUM_RECORDS]
        panel_bytes, blocks = num_records * record_bytes, num_records * record_blocks
        # Bytes that a tile asks for while a block goes by: of what comes AHEAD where it is the only tile, else its share of the
        # next panel, which the last tile leaves in the cache.
        step = (panel_bytes + tiles * blocks - 1) // (tiles * blocks)
        lines = (step + LINE - 1) // LINE
        for panel in range(begin, end):
            column = first_column + panel * PANEL
            is_whole = column + PANEL <= end_column
            target, stride = (flat, columns) if is_whole else (flat_scratch, PANEL)
            start = panel * panel_bytes
            ahead = start + (AHEAD if tiles == 1 else panel_bytes)
            row = 0
            while row < rows:
                count, first_word = tile_rows(row, rows, BLOCK_ROWS), row * blocks * block_words
                place = row * columns + column if is_whole else 0
                multiply_tile(kind, count, target, place, stride, x, first_word, records, start, num_records, ahead, step, lines)
                if not is_whole:
                    copy_tile(out, row, column, end_column, scratch, count)
                row += count
                ahead += blocks * step

    return make_task(multiply)


@functools.cache
def task(kind: int) -> int:
    """Of `crew.share`: the panels of a segment of this kind."""
    return _make_task(kind)


@compiled()
def multiply(out, words, records, segments, tasks, board):
    """out [rows, out_features] = the rows that `quantize_rows` packed times packed blocks, with the helpers that `board` has.

    records: their address; tasks: that of each segment's kind.
    """
    board[_OUT], board[_ROWS], board[_COLUMNS], board[_X] = out.ctypes.data, out.shape[0], out.shape[1], words.ctypes.data
    for s in range(len(segments)):
        kind, first_column, end_column, num_records = segments[s, 0], segments[s, 2], segments[s, 3], segments[s, 5]
        board[_RECORDS_AT], board[_NUM_RECORDS] = records + segments[s, 4], num_records
        board[_FROM], board[_TO] = first_column, end_column
        num_panels = (end_column - first_column + PANEL - 1) // PANEL
        share(board, tasks[s], num_panels, 1 + CHUNK_BYTES // (num_records * _RECORD_BYTES[kind]))
