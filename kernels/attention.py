"""Attention of new tokens over the paged KV cache: prefill chunks and decodes in one batch, grouped-query heads, causal, optional
sliding window and soft cap.

Online softmax over blocks in ascending order (Milakov and Gimelshein 2018, arXiv 1805.02867; tiled as in FlashAttention-2, arXiv
2307.08691). A token's result depends on its own query and its own KV alone, in a fixed order of summation: the same bits in every
batch and every chunking. Blocks are read where they lie. A bfloat16 cache is multiplied pair by pair (`cpu.pairs`), for which
queries and weights are rounded to bfloat16 too; sums are float32.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from kernels import device
from kernels.cpu.attention import TILE_FLOATS, can_pair, make_attend
from kernels.cpu.math import elements
from kernels.cpu.threads import for_ranges


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
    arrays = tuple(x.numpy() for x in (block_tables, rows, query_start, context_lens))
    keys, values = elements(key_cache), elements(value_cache)
    attention = StepAttention(arrays, query.shape[1], keys)
    return torch.from_numpy(attention(query.to(torch.float32).numpy(), keys, values, scale, window, soft_cap)).to(query.dtype)


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
