"""How the CPU's matrix products go through their rows and columns.

Weights lie in panels of PANEL adjacent output columns, each contiguous over the input columns, so that a product reads them once,
in order. A tile of the product, a few rows by one panel, stays in registers while the input columns go by. Rows are packed so that
those of a tile lie beside each other. Each element of a tile has its own chain of sums: a row's bits do not depend on what rows
stand beside it.
"""

from __future__ import annotations

from kernels.cpu.compiled import compiled
from kernels.cpu.ir import LANES, features

WIDE = "avx512f" in features()  # 32 registers of 16 lanes; else 16 of 8
# Of a tile as much as the registers hold, and rather rows than columns: eight decodes then are one tile, and read the weights while
# they compute; two tiles would read them with the first and compute without reading with the second.
HALF_PANEL = 48 if WIDE else 16  # columns
HALF_ROWS = 8 if WIDE else 6  # at most
BLOCK_PANEL = LANES
BLOCK_ROWS = 8 if WIDE else 3


def num_panels(columns: int, width: int) -> int:
    return -(-columns // width)


@compiled()
def tile_rows(row, rows, most):
    """Rows of the tile that begins at `row` of `rows`: as few tiles as there can be, of about equal size."""
    tiles = (rows + most - 1) // most
    size, larger = rows // tiles, rows % tiles
    return size + 1 if row < larger * (size + 1) else size


@compiled()
def copy_tile(out, row, column, end_column, tile, rows):
    """The part of a panel's tile, [rows, panel width], that is before `end_column`, into `out` at (row, column)."""
    width = min(tile.shape[1], end_column - column)
    for r in range(rows):
        for c in range(width):
            out[row + r, column + c] = tile[r, c]
