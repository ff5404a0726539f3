"""Attention of one step on the CPU, for all of its layers."""

from __future__ import annotations

import numpy as np

from kernels.cpu.attention import TILE_FLOATS, can_pair, make_attend
from kernels.cpu.compiled import compiled
from kernels.cpu.threads import for_ranges


class StepAttention:
    """`paged_attention` on the CPU, of one step: what is the same in all of its layers is made once.

    tables: block_tables, rows, query_start, context_lens; caches by `elements`, each of the shape and type that `key_cache` has.
    """

    def __init__(self, tables: tuple[np.ndarray, ...], num_heads: int, key_cache: np.ndarray) -> None:
        _, num_kv_heads, head_dim, block_size = key_cache.shape
        self._tables = tables
        self._tile_tokens = max(1, TILE_FLOATS // (num_heads // num_kv_heads * head_dim))
        self._tiles = make_tiles(tables[2], self._tile_tokens)
        self._attend = make_attend(head_dim, block_size, key_cache.dtype == np.uint16 and can_pair(head_dim, block_size))

    def __call__(
        self, query: np.ndarray, key_cache: np.ndarray, value_cache: np.ndarray, scale: float, window: int, soft_cap: float = 0.0
    ) -> np.ndarray:
        """query [num_tokens, num_heads, head_dim] float32; returns as much."""
        out = np.empty(query.shape, np.float32)
        # one token's query is by itself, several tokens' among keys and values are not: one code for both
        arrays = (out, np.ascontiguousarray(query), key_cache, value_cache, *self._tables, self._tiles)
        numbers = (self._tile_tokens, np.float32(scale), np.float32(soft_cap), window)
        for_ranges(lambda begin, end: self._attend(*arrays, *numbers, begin, end), len(self._tiles))
        return out


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
