"""The loop of `kv_write` on the CPU."""

from __future__ import annotations

from kernels.cpu.compiled import compiled
from kernels.cpu.math import narrow


@compiled()
def write(key, first_key, value, first_value, key_cache, value_cache, slots):
    """`kv_write` of `cpu.math.elements`: of adjacent heads of key from first_key on, and of value, which may be the same array.
    Both may be float32 and are then narrowed to the caches' type."""
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
