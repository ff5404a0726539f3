"""Writing keys and values into slots."""

import pytest
import torch

from kernels import reference
from kernels.triton.kv_write import kv_write


@pytest.mark.parametrize(("kv_heads", "head_dim", "block"), [(3, 20, 16), (1, 64, 8), (8, 16, 32)])
@pytest.mark.parametrize("transposed", [False, True])
def test_kv_write_from_slices_of_a_fused_projection(device, dtype, kv_heads, head_dim, block, transposed):
    num_tokens = 7
    fused = torch.randn(num_tokens, 2 * kv_heads * head_dim, device=device).to(dtype)
    key, value = (x.view(num_tokens, kv_heads, head_dim) for x in fused.chunk(2, dim=1))
    slots = torch.tensor([block, 5, -1, 4 * block - 1, 2 * block + 3, -1, 0], device=device)
    if transposed:  # a GPU's key cache
        key_cache = torch.zeros(4, kv_heads, block, head_dim, dtype=dtype, device=device).transpose(2, 3)
    else:
        key_cache = torch.zeros(4, kv_heads, head_dim, block, dtype=dtype, device=device)
    value_cache = torch.zeros(4, kv_heads, block, head_dim, dtype=dtype, device=device)
    expected = [key_cache.clone(), value_cache.clone()]
    kv_write(key, value, key_cache, value_cache, slots)
    reference.kv_write(key, value, *expected, slots)
    assert torch.equal(key_cache, expected[0]) and torch.equal(value_cache, expected[1])
    assert torch.equal(key_cache[1, :, :, 0], key[0])
