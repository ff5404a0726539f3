"""A tile of attention on the CPU: a few tokens of a request, and some of its key-value heads, span by span of the cache.

A head's rows are queries, token by token, the token's heads that share its keys beside each other: num_rows from first_row on, of
which the first `unseeing` stand before a span. `start`: the first token's position, counted from the span's first.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types
from numba.extending import overload

from kernels.cpu.math import exp_float32
from kernels.cpu.pairs import PAIR, pair
from kernels.cpu.softmax import weigh
from kernels.cpu.vectors import MOST_ROWS, add_weighted, score

_ONE, _TWO = np.float32(1.0), np.float32(2.0)
MINUS_INFINITY = np.float32(-np.inf)


@numba.njit(inline="always")
def seen_by(position, window, width):
    """First and end of the tokens of a span that a query at `position` of it sees."""
    return max(0, position - window + 1) if window > 0 else 0, min(width, position + 1)


@numba.njit(inline="always")
def seen_by_any(first, last, window, width):
    """First and end of what queries at positions first..last of a span see of it together."""
    low, _ = seen_by(first, window, width)
    _, high = seen_by(last, window, width)
    return low, high


def put_query(queries, row, query, scale):
    """A query times `scale` into queries[row]: float32, or words of pairs."""
    raise NotImplementedError("for compiled code only")


@overload(put_query)
def _put_query(queries, row, query, scale):
    return _put_query_pairs if queries.dtype == types.uint32 else _put_query_floats


def _put_query_floats(queries, row, query, scale):
    for d in range(len(query)):
        queries[row, d] = query[d] * scale


def _put_query_pairs(queries, row, query, scale):
    for i in range(len(query) // PAIR):
        queries[row, i] = pair(query[PAIR * i] * scale, query[PAIR * i + 1] * scale)


@numba.njit(inline="always")
def query_of(row, first, first_head, num_rows, group):
    """Token and head of a row, where rows of head after head follow one another."""
    return first + row % num_rows // group, (first_head + row // num_rows) * group + row % group


@numba.njit(inline="always")
def score_rows(
    scores, queries, caches, table, first_block, end_block, head, first_row, unseeing, num_rows, start, group, width, head_dim,
    block_size, at_once,
):  # fmt: skip
    """Scores of a head's rows with the span's blocks up to `end_block`, of which `table` has the first at `first_block`."""
    keys, values = caches
    row, end_row = first_row + unseeing, first_row + num_rows
    while row < end_row:
        count = min(MOST_ROWS, end_row - row)
        seen_blocks = (start + (row - first_row + count - 1) // group) // block_size + 1  # behind them none of these queries stands
        index, end = 0, min(end_block, seen_blocks)
        while index < end:
            blocks = min(at_once, end - index)
            place, first = row * width + index * block_size, first_block + index
            score(count, scores, place, width, queries, row, keys, values, table, first, blocks, head, head_dim, block_size)
            index += blocks
        row += count


@numba.njit(inline="always")
def weigh_rows(
    weights, scores, weighted, highest, sums, first_row, unseeing, num_rows, start, group, window, soft_cap, width, head_dim
):
    """A head's scores of a span become weights."""
    for row in range(first_row + unseeing, first_row + num_rows):
        low, high = seen_by(start + (row - first_row) // group, window, width)
        if soft_cap > 0.0:
            for i in range(row * width, row * width + width):  # soft_cap * tanh(score / soft_cap)
                scores[i] = soft_cap - _TWO * soft_cap / (exp_float32(scores[i] * (_TWO / soft_cap)) + _ONE)
        weigh(scores, weights, row, low, high, highest, sums, weighted, width, head_dim)


@numba.njit(inline="always")
def add_rows(
    weighted, weights, caches, table, first_block, next_table, next_block, head, first_row, unseeing, num_rows, start, group,
    window, width, head_dim, block_size,
):  # fmt: skip
    """Adds the weighted values of the span, whose first block `table` has at `first_block`, to a head's rows."""
    keys, values = caches
    row, end_row = first_row + unseeing, first_row + num_rows
    while row < end_row:
        count = min(MOST_ROWS, end_row - row)
        from_first, from_last = row - first_row, row - first_row + count - 1
        # only tokens that some of these rows see: what others left in the block may be NaN
        low, high = seen_by_any(start + from_first // group, start + from_last // group, window, width)
        add_weighted(
            count, weighted, row, weights, row * width, width, values, table, first_block, low, high, keys, next_table, next_block,
            head, head_dim, block_size,
        )  # fmt: skip
        row += count
