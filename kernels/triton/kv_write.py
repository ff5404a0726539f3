"""Writes the keys and values of new tokens into their slots of the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.variant import Variant


def kv_write(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """As `kernels.kv_write.kv_write`; any strides, and what the caches hold may be narrower than what comes."""
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    width = triton.next_power_of_2(num_kv_heads * head_dim)
    _kv_write_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        *key.stride(),
        *value.stride(),
        *key_cache.stride(),
        *value_cache.stride(),
        num_kv_heads * head_dim,
        head_dim,
        key_cache.shape[3],
        width,
        num_warps=min(8, max(1, width // 256)),
        enable_fp_fusion=False,
    )


@triton.jit
def _kv_write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_token,
    key_head,
    key_dim,
    value_token,
    value_head,
    value_dim,
    key_cache_block,
    key_cache_head,
    key_cache_dim,
    key_cache_offset,
    value_cache_block,
    value_cache_head,
    value_cache_offset,
    value_cache_dim,
    num_elements,  # of a token's key
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program a token: cache[slot // block_size, head, slot % block_size] = new[token, head]. A slot below 0 is skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    element = tl.arange(0, WIDTH)
    head = element // HEAD_DIM
    dim = element % HEAD_DIM
    inside = element < num_elements
    new_key = tl.load(key + token * key_token + head * key_head + dim * key_dim, mask=inside)
    key_place = block * key_cache_block + head * key_cache_head + dim * key_cache_dim + offset * key_cache_offset
    tl.store(key_cache + key_place, new_key.to(key_cache.dtype.element_ty), mask=inside)
    new_value = tl.load(value + token * value_token + head * value_head + dim * value_dim, mask=inside)
    value_place = block * value_cache_block + head * value_cache_head + offset * value_cache_offset + dim * value_cache_dim
    tl.store(value_cache + value_place, new_value.to(value_cache.dtype.element_ty), mask=inside)


def _example(head_dim: int) -> None:
    heads, kv_heads = 32, 8
    qkv = torch.empty(256, heads + 2 * kv_heads, head_dim, dtype=torch.bfloat16, device="meta")
    _, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
    cache = torch.empty(2, 1024, kv_heads, 16, head_dim, dtype=torch.bfloat16, device="meta")
    kv_write(key, value, cache[0].transpose(2, 3), cache[1], torch.empty(256, dtype=torch.int64, device="meta"))


AOT_VARIANTS = [Variant(f"bfloat16, head_dim {head_dim}", _example, {"head_dim": head_dim}) for head_dim in (64, 128)]
