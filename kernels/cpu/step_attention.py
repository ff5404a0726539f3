"""Attention on the CPU by the sizes of heads and blocks: which compiled code there is for them, and in what tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu import crew
from kernels.cpu.attention import TILE_FLOATS, attend, can_pair, make_tiles, task


def tile_tokens(num_heads: int, key_cache: NDArray[Any]) -> int:
    """Tokens of a tile, whose accumulators stay in the cache."""
    _, num_kv_heads, head_dim, _ = key_cache.shape
    return max(1, TILE_FLOATS // (num_heads // num_kv_heads * head_dim))


def attention_task(key_cache: NDArray[Any]) -> int:
    """Of `crew.share`, for caches like this one."""
    _, _, head_dim, block_size = key_cache.shape
    return task(head_dim, block_size, key_cache.dtype.name, key_cache.dtype == np.uint16 and can_pair(head_dim, block_size))


def attend_step(
    query: NDArray[np.float32],
    key_cache: NDArray[Any],
    value_cache: NDArray[Any],
    tables: tuple[NDArray[np.int32], ...],
    scale: float,
    window: int,
    soft_cap: float,
) -> NDArray[np.float32]:
    """`kernels.attention.paged_attention` of numpy arrays; caches by `cpu.math.elements`."""
    out = np.empty(query.shape, np.float32)
    length = tile_tokens(query.shape[1], key_cache)
    # one token's query is contiguous by itself, several tokens' among keys and values are not: one code for both
    arrays = (out, np.ascontiguousarray(query), key_cache, value_cache, tables, make_tiles(tables[2], length))
    attend(*arrays, length, scale, soft_cap, window, crew.board(), attention_task(key_cache))
    return out
