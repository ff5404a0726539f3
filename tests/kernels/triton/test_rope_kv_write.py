"""Queries turned in place, turned keys and plain values in the cache, also in a narrower type; slots below 0 are skipped."""

import pytest
import torch

from kernels import reference
from kernels.triton.rope_kv_write import rope_kv_write

ERROR = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}  # the reference rounds angles and products too


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (17, 1, 20), (2, 2, 16)])
@pytest.mark.parametrize("cache_dtype", [None, torch.float16])
def test_against_rope_and_kv_write(device, dtype, heads, kv_heads, head_dim, cache_dtype):
    cache_dtype = cache_dtype or dtype
    fused = torch.randn(6, heads + 2 * kv_heads, head_dim, device=device).to(dtype)
    angles = torch.rand(50, head_dim // 2, device=device) * 100
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.tensor([0, 49, 3, 4, 5, 3], device=device)
    slots = torch.tensor([16, 5, -1, 63, 40, 0], device=device)
    key_cache, value_cache = torch.zeros(2, 4, kv_heads, 16, head_dim, dtype=cache_dtype, device=device)
    ours = fused.clone(), key_cache.transpose(2, 3), value_cache
    theirs = tuple(x.clone() for x in (fused, *ours[1:]))
    for function, (x, keys, values) in ((rope_kv_write, ours), (reference.rope_kv_write, theirs)):
        function(x, kv_heads, positions, cos_sin, keys, values, slots)
    error = max(ERROR[dtype], ERROR[cache_dtype])
    torch.testing.assert_close(ours[0][:, :heads], theirs[0][:, :heads], atol=error, rtol=error)
    torch.testing.assert_close(ours[1], theirs[1], atol=error, rtol=error)
    assert torch.equal(ours[2], theirs[2]) and ours[2].any()
