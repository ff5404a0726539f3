"""Writes the keys and values of new tokens into their slots of the paged cache."""

from __future__ import annotations

import numba
import torch

from kernels import device


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
    if key.dtype == torch.bfloat16:  # elements are only moved: their bits do
        key, value, key_cache, value_cache = (x.view(torch.uint16) for x in (key, value, key_cache, value_cache))
    _write(key.numpy(), value.numpy(), key_cache.numpy(), value_cache.numpy(), slots.numpy())


@numba.njit(cache=True, nogil=True)
def _write(key, value, key_cache, value_cache, slots):
    num_kv_heads, head_dim, block_size = key_cache.shape[1:]
    for token in range(len(slots)):
        if slots[token] < 0:
            continue
        block, offset = divmod(slots[token], block_size)
        for head in range(num_kv_heads):
            for d in range(head_dim):
                key_cache[block, head, d, offset] = key[token, head, d]
                value_cache[block, head, offset, d] = value[token, head, d]
