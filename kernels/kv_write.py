"""Writes the keys and values of new tokens into their slots of the paged cache."""

from __future__ import annotations

import torch

from kernels import device
from kernels.cpu.kv_write import write
from kernels.cpu.math import elements


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
