"""The loop of `rope_kv_write` on the CPU."""

from __future__ import annotations

from kernels.cpu.compiled import compiled
from kernels.cpu.kv_write import write
from kernels.cpu.rope import rotate


@compiled()
def rotate_and_write(heads, num_kv_heads, positions, cos_sin, key_cache, value_cache, slots):
    """`rope_kv_write` of float32 heads; caches by `cpu.math.elements`."""
    first_value = heads.shape[1] - num_kv_heads
    rotate(heads, first_value, positions, cos_sin)
    write(heads, first_value - num_kv_heads, heads, first_value, key_cache, value_cache, slots)
