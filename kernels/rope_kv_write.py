"""The work before attention, in one pass over the fused projection: queries and keys are turned, keys and values stored."""

from __future__ import annotations

import torch

from kernels import device, reference
from kernels.cpu.math import elements
from kernels.cpu.rope_kv_write import rotate_and_write


def rope_kv_write(
    heads: torch.Tensor,
    num_kv_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """`rope.rope` of queries, in place, and of keys, then `kv_write.kv_write` in the caches' type.

    heads       [num_tokens, num_heads + 2 * num_kv_heads, head_dim], contiguous: queries, keys, values. Whether the keys are
                turned in place too differs between devices.
    positions   [num_tokens] int64
    cos_sin     [num_positions, head_dim] float32, as `rope.rope`'s
    key_cache   [num_blocks, num_kv_heads, head_dim, block_size] float32, bfloat16 or float16
    value_cache [num_blocks, num_kv_heads, block_size, head_dim]
    slots       [num_tokens] int64; below 0: stored nowhere
    """
    arguments = (heads, num_kv_heads, positions, cos_sin, key_cache, value_cache, slots)
    if device.on_accelerator(heads):
        device.accelerated("rope_kv_write", "rope_kv_write")(*arguments)
        return
    if heads.dtype != torch.float32:
        reference.rope_kv_write(*arguments)
        return
    arrays = (heads.numpy(), num_kv_heads, positions.numpy(), cos_sin.numpy())
    rotate_and_write(*arrays, elements(key_cache), elements(value_cache), slots.numpy())
