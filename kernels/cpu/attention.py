"""The loops of `attention.paged_attention` on the CPU, compiled for one head dimension and block size: both are then constants."""

from __future__ import annotations

import functools

import numba
import numpy as np
from numba.np.numpy_support import carray

from kernels.cpu.attention_tile import MINUS_INFINITY, add_rows, put_query, query_of, score_rows, seen_by_any, weigh_rows
from kernels.cpu.compiled import compiled
from kernels.cpu.crew import OPERANDS, make_task, num_threads, pointer_to, share
from kernels.cpu.pairs import PAIR
from kernels.cpu.vectors import blocks_at_once

TILE_FLOATS = 4096  # accumulators of a tile, 16 KiB: with a key and a value block of 4 KiB each they stay in a 32 KiB L1 cache
SPAN_TOKENS = 64  # of the cache between two looks at the highest score; spans begin at multiples of it, whatever the step
CHUNKS_PER_THREAD = 4  # tiles differ in cost, so threads take several smaller chunks


def can_pair(head_dim: int, block_size: int) -> bool:
    """Whether products with a bfloat16 cache go pair by pair, queries and weights rounded to bfloat16 as well."""
    return head_dim % PAIR == 0 and block_size % PAIR == 0


@functools.cache
def task(head_dim: int, block_size: int, cached: str, paired: bool) -> int:
    """Of `crew.share`: attention of a step's tiles, each in `head_parts` parts of its key-value heads.

    cached: the caches' numpy type, as `cpu.math.widen` knows them; `paired`: they are bfloat16, and `can_pair` holds.
    """
    return _make_task(head_dim, block_size, np.dtype(cached).type, paired)


def _make_task(head_dim: int, block_size: int, cached: type[np.generic], paired: bool) -> int:
    blocks = max(1, SPAN_TOKENS // block_size)
    width, at_once = blocks * block_size, blocks_at_once(block_size)
    # Numbers and types alone may be closed over: numba finds compiled code by their pickles, and a function has another each time.
    element, in_word = (np.uint32, PAIR) if paired else (np.float32, 1)

    def attend(board, begin, end):
        out, query, key_cache, value_cache = _arrays(board, head_dim, block_size, cached)
        caches = (key_cache, value_cache)
        block_tables, rows, query_start, context_lens, tiles = _tables(board)
        num_kv_heads, head_parts, tile_tokens, window = key_cache.shape[1], board[_HEAD_PARTS], board[_TILE_TOKENS], board[_WINDOW]
        scale, soft_cap = np.int32(board[_SCALE]).view(np.float32), np.int32(board[_SOFT_CAP]).view(np.float32)
        group = board[_NUM_HEADS] // num_kv_heads
        most_rows = max(tile_tokens, num_kv_heads) * group
        queries = np.empty((most_rows, head_dim // in_word), element)
        weighted = np.empty((most_rows, head_dim), np.float32)  # sum of exp(score - highest) * value
        highest = np.empty(most_rows, np.float32)
        sums = np.empty(most_rows, np.float32)  # sum of exp(score - highest)
        scores = np.empty(most_rows * width, np.float32)
        weights = np.empty(most_rows * width // in_word, element) if paired else scores
        for item in range(begin, end):
            tile, part = item // head_parts, item % head_parts
            begin_head, end_head = num_kv_heads * part // head_parts, num_kv_heads * (part + 1) // head_parts
            request, first = tiles[tile]
            block_table = block_tables[rows[request]]
            next_request = block_tables[rows[tiles[(min(item + 1, end - 1)) // head_parts, 0]]]
            last = min(first + tile_tokens, query_start[request + 1]) - 1
            num_tokens = last - first + 1
            num_rows = num_tokens * group  # of a key-value head
            shift = context_lens[request] - query_start[request + 1]  # position of a token = its index + shift
            first_seen = max(0, first + shift - window + 1) if window > 0 else 0
            # Few tokens take all heads at once: a block's heads lie side by side in memory, which then comes in order. Many take
            # one head after the other, whose rows stay in the cache meanwhile.
            heads_at_once = end_head - begin_head if num_tokens * num_kv_heads <= most_rows // group else 1
            for first_head in range(begin_head, end_head, heads_at_once):
                for row in range(heads_at_once * num_rows):
                    token, head = query_of(row, first, first_head, num_rows, group)
                    put_query(queries, row, query[token, head], scale)
                    weighted[row] = 0.0
                    highest[row] = MINUS_INFINITY
                    sums[row] = 0.0
                last_span = (last + shift) // width
                for span in range(first_seen // width, last_span + 1):
                    start = first + shift - span * width  # the first query's position, counted from the span's first
                    unseeing = 0
                    if window == 0:  # queries before the span see nothing of it
                        unseeing = max(0, -start) * group
                    _, top = seen_by_any(start + unseeing // group, start + num_tokens - 1, window, width)
                    end_block = (top + block_size - 1) // block_size
                    # What is read next: the next span, or the next request's first one.
                    next_table, next_block = block_table, (span + 1) * blocks
                    if span == last_span and heads_at_once > 1:
                        next_table, next_block = next_request, 0
                    for head in range(heads_at_once):
                        score_rows(
                            scores, queries, caches, block_table, span * blocks, end_block, first_head + head, head * num_rows,
                            unseeing, num_rows, start, group, width, head_dim, block_size, at_once,
                        )  # fmt: skip
                    for head in range(heads_at_once):
                        weigh_rows(
                            weights, scores, weighted, highest, sums, head * num_rows, unseeing, num_rows, start, group, window,
                            soft_cap, width, head_dim,
                        )  # fmt: skip
                    for head in range(heads_at_once):
                        add_rows(
                            weighted, weights, caches, block_table, span * blocks, next_table, next_block, first_head + head,
                            head * num_rows, unseeing, num_rows, start, group, window, width, head_dim, block_size,
                        )  # fmt: skip
                for row in range(heads_at_once * num_rows):
                    token, head = query_of(row, first, first_head, num_rows, group)
                    for d in range(head_dim):
                        out[token, head, d] = weighted[row, d] / sums[row]

    return make_task(attend, fastmath={"contract"})


# ---- the task's operands, on the board ----

(
    _OUT, _QUERY, _NUM_TOKENS, _QUERY_HEADS, _NUM_HEADS, _KEYS, _VALUES, _NUM_BLOCKS, _NUM_KV_HEADS, _TABLES, _TABLE_ROWS,
    _TABLE_WIDTH, _ROWS, _QUERY_START, _CONTEXT_LENS, _NUM_REQUESTS, _TILES, _NUM_TILES, _TILE_TOKENS, _SCALE, _SOFT_CAP, _WINDOW,
    _HEAD_PARTS,
) = range(OPERANDS, OPERANDS + 23)  # fmt: skip


@numba.njit(inline="always")
def _arrays(board, head_dim, block_size, cached):
    num_tokens, num_blocks, num_kv_heads = board[_NUM_TOKENS], board[_NUM_BLOCKS], board[_NUM_KV_HEADS]
    return (
        carray(pointer_to(board[_OUT], np.float32), (num_tokens, board[_NUM_HEADS], head_dim)),
        carray(pointer_to(board[_QUERY], np.float32), (num_tokens, board[_QUERY_HEADS], head_dim)),
        carray(pointer_to(board[_KEYS], cached), (num_blocks, num_kv_heads, head_dim, block_size)),
        carray(pointer_to(board[_VALUES], cached), (num_blocks, num_kv_heads, block_size, head_dim)),
    )


@numba.njit(inline="always")
def _tables(board):
    num_requests = board[_NUM_REQUESTS]
    return (
        carray(pointer_to(board[_TABLES], np.int32), (board[_TABLE_ROWS], board[_TABLE_WIDTH])),
        carray(pointer_to(board[_ROWS], np.int32), (num_requests,)),
        carray(pointer_to(board[_QUERY_START], np.int32), (num_requests + 1,)),
        carray(pointer_to(board[_CONTEXT_LENS], np.int32), (num_requests,)),
        carray(pointer_to(board[_TILES], np.int32), (board[_NUM_TILES], 2)),
    )


@compiled()
def attend(out, query, key_cache, value_cache, tables, tiles, tile_tokens, scale, soft_cap, window, board, task):
    """Attention of a step's `tiles` (`make_tiles`), with the helpers that `board` has.

    out [num_tokens, num_heads, head_dim]; query the same, or with more heads behind those. Caches, and the tables block_tables,
    rows, query_start and context_lens, as in `kernels.attention`. Arrays are contiguous.
    """
    block_tables, rows, query_start, context_lens = tables
    board[_OUT], board[_QUERY], board[_NUM_TOKENS] = out.ctypes.data, query.ctypes.data, out.shape[0]
    board[_QUERY_HEADS], board[_NUM_HEADS] = query.shape[1], out.shape[1]
    board[_KEYS], board[_VALUES] = key_cache.ctypes.data, value_cache.ctypes.data
    board[_NUM_BLOCKS], board[_NUM_KV_HEADS] = key_cache.shape[0], key_cache.shape[1]
    board[_TABLES], board[_TABLE_ROWS], board[_TABLE_WIDTH] = block_tables.ctypes.data, block_tables.shape[0], block_tables.shape[1]
    board[_ROWS], board[_QUERY_START], board[_CONTEXT_LENS] = rows.ctypes.data, query_start.ctypes.data, context_lens.ctypes.data
    board[_NUM_REQUESTS], board[_TILES], board[_NUM_TILES] = len(rows), tiles.ctypes.data, len(tiles)
    board[_TILE_TOKENS], board[_WINDOW] = tile_tokens, window
    board[_SCALE], board[_SOFT_CAP] = np.float32(scale).view(np.int32), np.float32(soft_cap).view(np.int32)
    threads = num_threads(board)
    parts = 1
    if len(tiles) < 2 * threads and threads > 1:  # too few for all to have some
        parts = min(key_cache.shape[1], (2 * threads + len(tiles) - 1) // max(1, len(tiles)))
    board[_HEAD_PARTS] = parts
    items = len(tiles) * parts
    share(board, task, items, max(1, items // (CHUNKS_PER_THREAD * threads)))


@compiled()
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
