"""The work before attention, in one launch over the fused projection: queries and keys turned, keys and values stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.variant import Variant

HEADS = 16  # by one program


def rope_kv_write(
    heads: torch.Tensor,
    num_kv_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """As `kernels.rope_kv_write.rope_kv_write`; turned keys are in the cache alone. Any strides of the caches."""
    num_tokens, total_heads, head_dim = heads.shape
    if num_tokens == 0:
        return
    program_heads = min(HEADS, triton.next_power_of_2(total_heads))
    width = triton.next_power_of_2(head_dim // 2)
    _rope_kv_write_kernel[(num_tokens, triton.cdiv(total_heads, program_heads))](
        heads,
        positions,
        cos_sin,
        key_cache,
        value_cache,
        slots,
        total_heads,
        num_kv_heads,
        *key_cache.stride(),
        *value_cache.stride(),
        HALF=head_dim // 2,
        BLOCK_SIZE=key_cache.shape[3],
        HEADS=program_heads,
        WIDTH=width,
        num_warps=max(1, program_heads * width // 256),
        enable_fp_fusion=False,
    )


@triton.jit
def _rope_kv_write_kernel(
    heads, positions, cos_sin, key_cache, value_cache, slots, total_heads, num_kv_heads,
    key_block, key_head, key_dim, key_offset,
    value_block, value_head, value_offset, value_dim,
    HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program takes HEADS heads of one token, as pairs (a, b) of dimensions i and i + HALF. Queries and keys become
    (a cos - b sin, b cos + a sin), in float32, rounded once; queries go back, keys and values to the token's slot."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, WIDTH)
    first_value = total_heads - num_kv_heads
    first_key = first_value - num_kv_heads
    inside = (head < total_heads)[:, None] & (dim < HALF)[None, :]
    place = heads + ((token * total_heads + head) * (2 * HALF))[:, None] + dim[None, :]
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    angles = cos_sin + tl.load(positions + token) * (2 * HALF) + dim
    cos = tl.load(angles, mask=dim < HALF, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=dim < HALF, other=0.0)[None, :]
    is_turned = (head < first_value)[:, None]
    element = heads.dtype.element_ty
    new_a = tl.where(is_turned, a * cos - b * sin, a).to(element)
    new_b = tl.where(is_turned, b * cos + a * sin, b).to(element)
    is_query = inside & (head < first_key)[:, None]
    tl.store(place, new_a, mask=is_query)
    tl.store(place + HALF, new_b, mask=is_query)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    is_key = inside & ((head >= first_key) & (head < first_value))[:, None]
    key_place = key_cache + block * key_block + offset * key_offset
    key_place += ((head - first_key) * key_head)[:, None] + (dim * key_dim)[None, :]
    tl.store(key_place, new_a.to(key_cache.dtype.element_ty), mask=is_key)
    tl.store(key_place + HALF * key_dim, new_b.to(key_cache.dtype.element_ty), mask=is_key)
    is_value = inside & (head >= first_value)[:, None]
    value_place = value_cache + block * value_block + offset * value_offset
    value_place += ((head - first_value) * value_head)[:, None] + (dim * value_dim)[None, :]
    tl.store(value_place, new_a.to(value_cache.dtype.element_ty), mask=is_value)
    tl.store(value_place + HALF * value_dim, new_b.to(value_cache.dtype.element_ty), mask=is_value)


def _example(head_dim: int) -> None:
    heads, kv_heads = 32, 8
    cache = torch.empty(2, 1024, kv_heads, 16, head_dim, dtype=torch.bfloat16, device="meta")
    rope_kv_write(
        torch.empty(256, heads + 2 * kv_heads, head_dim, dtype=torch.bfloat16, device="meta"),
        kv_heads,
        torch.empty(256, dtype=torch.int64, device="meta"),
        torch.empty(8192, head_dim, dtype=torch.float32, device="meta"),
        cache[0].transpose(2, 3),
        cache[1],
        torch.empty(256, dtype=torch.int64, device="meta"),
    )


AOT_VARIANTS = [Variant(f"bfloat16, head_dim {head_dim}", _example, {"head_dim": head_dim}) for head_dim in (64, 128)]
