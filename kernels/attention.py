"""Attention of new tokens over the paged KV cache: prefill chunks and decodes in one batch, grouped-query heads, causal, optional
sliding window and soft cap.

Online softmax over blocks in ascending order (Milakov and Gimelshein 2018, arXiv 1805.02867; tiled as in FlashAttention-2, arXiv
2307.08691). A token's result depends on its own query and its own KV alone, in a fixed order of summation: the same bits in every
batch and every chunking. Blocks are read where they lie.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from kernels import device
from kernels.cpu_math import exp_float32, widen
from kernels.cpu_threads import for_ranges

TILE_FLOATS = 4096  # accumulators of a tile, 16 KiB: with a key and a value block of 4 KiB each they stay in a 32 KiB L1 cache
_MINUS_INFINITY = np.float32(-np.inf)
_ONE, _TWO = np.float32(1.0), np.float32(2.0)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attends `query`; the KV of its tokens stands in the cache already. Returns [num_tokens, num_heads, head_dim], query's dtype.

    query        [num_tokens, num_heads, head_dim], tokens of a request adjacent
    key_cache    [num_blocks, num_kv_heads, head_dim, block_size]; transposed, so that 16 scores are one vector
    value_cache  [num_blocks, num_kv_heads, block_size, head_dim]
    block_tables [max_rows, max_blocks] int32
    rows         [num_requests] int32, a request's row in block_tables
    query_start  [num_requests + 1] int32, first token of each request
    context_lens [num_requests] int32, tokens in the cache, the query's included: token j of a request with q query tokens has the
                 position context_len - q + j and sees positions up to its own
    window       a token sees itself and the window - 1 before it; 0: all
    soft_cap     scores become soft_cap * tanh(score / soft_cap) before the softmax (Gemma 2, arXiv 2408.00118); 0: as they are
    """
    if device.on_accelerator(query):
        return device.accelerated("attention", "paged_attention")(
            query, key_cache, value_cache, block_tables, rows, query_start, context_lens, scale, window, soft_cap
        )
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[1]
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=torch.float32)
    tile_tokens = max(1, TILE_FLOATS // (num_heads // num_kv_heads * head_dim))
    arrays = (
        out.numpy(),
        query.to(torch.float32).numpy(),
        _elements(key_cache),
        _elements(value_cache),
        block_tables.numpy(),
        rows.numpy(),
        query_start.numpy(),
        context_lens.numpy(),
        make_tiles(query_start.numpy(), tile_tokens),
    )
    num_items = len(arrays[-1]) * num_kv_heads
    scales = (np.float32(scale), np.float32(soft_cap))
    for_ranges(lambda begin, end: _attend(*arrays, tile_tokens, *scales, window, begin, end), num_items)
    return out.to(query.dtype)


def _elements(cache: torch.Tensor) -> np.ndarray:
    """As `cpu_math.widen` knows them."""
    bits = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}.get(cache.dtype, cache.dtype)
    return cache.view(bits).numpy()


@numba.njit(cache=True, nogil=True)
def make_tiles(query_start, tile_tokens):
    """Runs of at most `tile_tokens` adjacent tokens of one request: [num_tiles, 2] int32 (request, first token)."""
    num_requests = len(query_start) - 1
    num_tiles = 0
    for i in range(num_requests):
        num_tiles += (query_start[i + 1] - query_start[i] + tile_tokens - 1) // tile_tokens
    tiles = np.empty((num_tiles, 2), np.int32)
    tile = 0
    for i in range(num_requests):
        for token in range(query_start[i], query_start[i + 1], tile_tokens):
            tiles[tile, 0] = i
            tiles[tile, 1] = token
            tile += 1
    return tiles


@numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _attend(
    out, query, key_cache, value_cache, block_tables, rows, query_start, context_lens, tiles, tile_tokens, scale, soft_cap, window,
    begin, end,
):  # fmt: skip
    """Work items begin..end-1; item = tile * num_kv_heads + kv head."""
    num_heads, head_dim = query.shape[1], query.shape[2]
    num_kv_heads, block_size = key_cache.shape[1], key_cache.shape[3]
    group = num_heads // num_kv_heads
    queries = np.empty((tile_tokens * group, head_dim), np.float32)
    weighted = np.empty((tile_tokens * group, head_dim), np.float32)  # sum of exp(score - highest) * value
    highest = np.empty(tile_tokens * group, np.float32)
    total = np.empty(tile_tokens * group, np.float32)  # sum of exp(score - highest)
    scores = np.empty(block_size, np.float32)
    twice_cap = _TWO * soft_cap
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
            total[row] = 0.0
        first_seen = max(0, first + shift - window + 1) if window > 0 else 0
        for block_index in range(first_seen // block_size, (last + shift) // block_size + 1):
            block = block_tables[rows[request], block_index]
            keys = key_cache[block, kv_head]
            values = value_cache[block, kv_head]
            for row in range(num_rows):
                position = first + row // group + shift - block_index * block_size  # of the query, counted from the block's first
                high = min(block_size, position + 1)
                low = max(0, position - window + 1) if window > 0 else 0
                if low >= high:
                    continue
                _dot_block(scores, queries[row], keys)
                if soft_cap > 0.0:
                    for t in range(block_size):
                        scores[t] = soft_cap - twice_cap / (exp_float32(scores[t] * (_TWO / soft_cap)) + _ONE)  # soft_cap * tanh
                highest_now = highest[row]
                for t in range(low, high):
                    highest_now = max(highest_now, scores[t])
                if highest_now > highest[row]:
                    shrink = exp_float32(highest[row] - highest_now)
                    total[row] *= shrink
                    for d in range(head_dim):
                        weighted[row, d] *= shrink
                    highest[row] = highest_now
                for t in range(block_size):
                    scores[t] = exp_float32(scores[t] - highest_now)
                # What is masked is skipped, not multiplied by zero: a block may hold another request's leftover NaN there.
                sum_now = np.float32(0.0)
                for t in range(low, high):
                    sum_now += scores[t]
                total[row] += sum_now
                _add_weighted(weighted[row], scores, values, low, high)
        for row in range(num_rows):
            for d in range(head_dim):
                out[first + row // group, kv_head * group + row % group, d] = weighted[row, d] / total[row]


@numba.njit(inline="always", fastmath={"contract"})
def _dot_block(scores, query, keys):
    """scores[t] = query . keys[:, t]; eight dimensions a pass, so that scores are loaded and stored once for eight products."""
    head_dim, block_size = keys.shape
    for t in range(block_size):
        scores[t] = 0.0
    whole = head_dim // 8 * 8
    for d in range(0, whole, 8):
        q0, q1, q2, q3 = query[d], query[d + 1], query[d + 2], query[d + 3]
        q4, q5, q6, q7 = query[d + 4], query[d + 5], query[d + 6], query[d + 7]
        for t in range(block_size):
            a = q0 * widen(keys[d, t]) + q1 * widen(keys[d + 1, t]) + q2 * widen(keys[d + 2, t]) + q3 * widen(keys[d + 3, t])
            b = q4 * widen(keys[d + 4, t]) + q5 * widen(keys[d + 5, t]) + q6 * widen(keys[d + 6, t]) + q7 * widen(keys[d + 7, t])
            scores[t] += a + b
    for d in range(whole, head_dim):
        for t in range(block_size):
            scores[t] += query[d] * widen(keys[d, t])


@numba.njit(inline="always", fastmath={"contract"})
def _add_weighted(weighted, weights, values, low, high):
    """weighted += sum of weights[t] * values[t] over low..high-1; four tokens a pass, for the same reason."""
    head_dim = values.shape[1]
    whole = low + (high - low) // 4 * 4
    for t in range(low, whole, 4):
        w0, w1, w2, w3 = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        for d in range(head_dim):
            weighted[d] += (
                w0 * widen(values[t, d])
                + w1 * widen(values[t + 1, d])
                + w2 * widen(values[t + 2, d])
                + w3 * widen(values[t + 3, d])
            )
    for t in range(whole, high):
        for d in range(head_dim):
            weighted[d] += weights[t] * widen(values[t, d])
