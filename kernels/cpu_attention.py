"""The loops of `attention.paged_attention` on the CPU, compiled for one head dimension and block size: both are then constants."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numba
import numpy as np

from kernels.cpu_math import exp_float32
from kernels.cpu_vectors import (
    add_weighted1,
    add_weighted2,
    add_weighted3,
    add_weighted4,
    largest,
    scores1,
    scores2,
    scores3,
    scores4,
    total,
)

TILE_FLOATS = 4096  # accumulators of a tile, 16 KiB: with a key and a value block of 4 KiB each they stay in a 32 KiB L1 cache
_ONE, _TWO = np.float32(1.0), np.float32(2.0)
_MINUS_INFINITY = np.float32(-np.inf)


@numba.njit(inline="always")
def _subtract_highest(scores, weighted, highest, sums, row, low, high, soft_cap, head_dim, block_size):
    """Scores of a row become distances below the highest so far; what the row has shrinks where that grows."""
    if soft_cap > 0.0:
        for t in range(block_size):  # soft_cap * tanh(score / soft_cap)
            scores[row, t] = soft_cap - _TWO * soft_cap / (exp_float32(scores[row, t] * (_TWO / soft_cap)) + _ONE)
    if high - low < block_size:
        for t in range(block_size):
            if t < low or t >= high:
                scores[row, t] = _MINUS_INFINITY
    highest_now = max(highest[row], largest(scores, row, block_size))
    if highest_now > highest[row]:
        shrink = exp_float32(highest[row] - highest_now)
        sums[row] *= shrink
        for d in range(head_dim):
            weighted[row, d] *= shrink
        highest[row] = highest_now
    for t in range(block_size):
        scores[row, t] -= highest_now


@numba.njit(inline="always")
def _exponentiate(x):
    """Over several rows at once, of a length unknown to LLVM, which would unroll a short one into scalars."""
    for i in range(len(x)):
        x[i] = exp_float32(x[i])


@numba.njit(inline="always")
def _add_weights(scores, sums, row, low, high, block_size):
    if high - low < block_size:  # masked weights are 0
        for t in range(block_size):
            if t < low or t >= high:
                scores[row, t] = np.float32(0.0)
    sums[row] += total(scores, row, block_size)


@functools.cache
def make_attend(head_dim: int, block_size: int) -> Callable[..., None]:
    """attend(out, query, key_cache, value_cache, block_tables, rows, query_start, context_lens, tiles, tile_tokens, scale,
    soft_cap, window, begin, end): work items begin..end-1; item = tile * num_kv_heads + kv head. Caches as `cpu_math.widen` knows
    them."""

    @numba.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy")
    def attend(
        out, query, key_cache, value_cache, block_tables, rows, query_start, context_lens, tiles, tile_tokens, scale, soft_cap,
        window, begin, end,
    ):  # fmt: skip
        num_kv_heads = key_cache.shape[1]
        group = query.shape[1] // num_kv_heads
        most_rows = tile_tokens * group
        queries = np.empty((most_rows, head_dim), np.float32)
        weighted = np.empty((most_rows, head_dim), np.float32)  # sum of exp(score - highest) * value
        highest = np.empty(most_rows, np.float32)
        sums = np.empty(most_rows, np.float32)  # sum of exp(score - highest)
        scores = np.empty((most_rows, block_size), np.float32)
        all_scores = scores.reshape(-1)
        for item in range(begin, end):
            request, first = tiles[item // num_kv_heads]
            kv_head = item % num_kv_heads
            last = min(first + tile_tokens, query_start[request + 1]) - 1
            num_rows = (last - first + 1) * group
            shift = context_lens[request] - query_start[request + 1]  # position of a token = its index + shift
            for row in range(num_rows):
                for d in range(head_dim):
                    queries[row, d] = query[first + row // group, kv_head * group + row % group, d] * scale
                    weighted[row, d] = 0.0
                highest[row] = _MINUS_INFINITY
                sums[row] = 0.0
            first_seen = max(0, first + shift - window + 1) if window > 0 else 0
            for block_index in range(first_seen // block_size, (last + shift) // block_size + 1):
                block = block_tables[rows[request], block_index]
                keys = key_cache[block, kv_head]
                values = value_cache[block, kv_head]
                start = first + shift - block_index * block_size  # the first query's position, counted from the block's first
                row = 0
                if window == 0:  # queries before the block see nothing of it
                    row = max(0, -start) * group
                while row < num_rows:
                    count = min(4, num_rows - row)
                    if count == 4:
                        scores4(scores, queries, row, keys, head_dim, block_size)
                    elif count == 3:
                        scores3(scores, queries, row, keys, head_dim, block_size)
                    elif count == 2:
                        scores2(scores, queries, row, keys, head_dim, block_size)
                    else:
                        scores1(scores, queries, row, keys, head_dim, block_size)
                    for r in range(row, row + count):
                        position = start + r // group
                        high = min(block_size, position + 1)
                        low = max(0, position - window + 1) if window > 0 else 0
                        _subtract_highest(scores, weighted, highest, sums, r, low, high, soft_cap, head_dim, block_size)
                    _exponentiate(all_scores[row * block_size : (row + count) * block_size])
                    lowest, top = block_size, 0  # the tokens that any of these rows sees: what others left there may be NaN
                    for r in range(row, row + count):
                        position = start + r // group
                        high = min(block_size, position + 1)
                        low = max(0, position - window + 1) if window > 0 else 0
                        _add_weights(scores, sums, r, low, high, block_size)
                        if low < high:
                            lowest, top = min(lowest, low), max(top, high)
                    if count == 4:
                        add_weighted4(weighted, scores, row, values, lowest, top, head_dim, block_size)
                    elif count == 3:
                        add_weighted3(weighted, scores, row, values, lowest, top, head_dim, block_size)
                    elif count == 2:
                        add_weighted2(weighted, scores, row, values, lowest, top, head_dim, block_size)
                    else:
                        add_weighted1(weighted, scores, row, values, lowest, top, head_dim, block_size)
                    row += count
            for row in range(num_rows):
                for d in range(head_dim):
                    out[first + row // group, kv_head * group + row % group, d] = weighted[row, d] / sums[row]

    return attend
