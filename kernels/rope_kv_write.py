"""What attention needs done first, in one pass over the fused projection: queries and keys turned, keys and values stored."""

from __future__ import annotations

import numba
import torch

from kernels import device, reference
from kernels.cpu_math import narrow


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
    bits = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}.get(key_cache.dtype, key_cache.dtype)
    turn_and_write(
        heads.numpy(),
        num_kv_heads,
        positions.numpy(),
        cos_sin.numpy(),
        key_cache.view(bits).numpy(),
        value_cache.view(bits).numpy(),
        slots.numpy(),
    )


@numba.njit(cache=True, nogil=True)
def turn_and_write(heads, num_kv_heads, positions, cos_sin, key_cache, value_cache, slots):
    """`rope_kv_write` of float32 heads; caches as `cpu_math.widen` knows them."""
    num_tokens, total_heads, head_dim = heads.shape
    block_size = key_cache.shape[3]
    half = head_dim // 2
    first_key, first_value = total_heads - 2 * num_kv_heads, total_heads - num_kv_heads
    for token in range(num_tokens):
        angles = cos_sin[positions[token]]
        for head in range(first_value):
            for i in range(half):
                a, b = heads[token, head, i], heads[token, head, i + half]
                heads[token, head, i] = a * angles[i] - b * angles[i + half]
                heads[token, head, i + half] = b * angles[i] + a * angles[i + half]
        if slots[token] < 0:
            continue
        block, offset = divmod(slots[token], block_size)
        for head in range(num_kv_heads):
            keys, values = key_cache[block, head], value_cache[block, head, offset]
            for d in range(head_dim):
                keys[d, offset] = narrow(heads[token, first_key + head, d], keys[d, offset])
            for d in range(head_dim):
                values[d] = narrow(heads[token, first_value + head, d], values[d])
