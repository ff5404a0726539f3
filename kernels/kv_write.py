"""Writes the keys and values of new tokens into their slots of the paged cache."""

from __future__ import annotations

import numba
import torch

from kernels import device
from kernels.cpu.math import elements, narrow


def kv_write(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Stores token i in slot slots[i] = block * block_size + offset. Slots of one call differ from one another; below 0,
    which pads a captured graph, a token is stored nowhere.

    key, value   [num_tokens, num_kv_heads, head_dim], any strides, the cache's dtype
    key_cache    [num_blocks, num_kv_heads, head_dim, block_size]
    value_cache  [num_blocks, num_kv_heads, block_size, head_dim]
    slots        [num_tokens] int64
    """
    if device.on_accelerator(key):
        device.accelerated("kv_write", "kv_write")(key, value, key_cache, value_cache, slots)
        return
    write(elements(key), 0, elements(value), 0, elements(key_cache), elements(value_cache), slots.numpy())


@numba.njit(cache=True, nogil=True)
def write(key, first_key, value, first_value, key_cache, value_cache, slots):
    """`kv_write` of `cpu.math.elements`: of adjacent heads of key from first_key on, and of value, which may be the same array.
    Both may be float32 whatever the caches hold, and are narrowed then."""
    num_kv_heads, head_dim, block_size = key_cache.shape[1:]
    for token in range(len(slots)):
        if slots[token] < 0:
            continue
        block, offset = divmod(slots[token], block_size)
        for head in range(num_kv_heads):
            keys, values = key_cache[block, head], value_cache[block, head, offset]
            for d in range(head_dim):
                keys[d, offset] = narrow(key[token, first_key + head, d], keys[d, offset])
            for d in range(head_dim):
                values[d] = narrow(value[token, first_value + head, d], values[d])
