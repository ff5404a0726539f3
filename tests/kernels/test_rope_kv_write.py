"""One pass is the same as turning queries and keys, then writing keys and values."""

import pytest
import torch

from kernels.kv_write import kv_write
from kernels.rope import rope
from kernels.rope_kv_write import rope_kv_write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_its_parts(dtype):
    tokens, heads, kv_heads, dim, block = 23, 6, 2, 24, 16
    projected = torch.randn(tokens, heads + 2 * kv_heads, dim)
    positions = torch.randint(0, 100, (tokens,))
    cos_sin = torch.randn(100, dim)
    slots = torch.randperm(10 * block)[:tokens]
    keys, values = torch.zeros(10, kv_heads, dim, block, dtype=dtype), torch.zeros(10, kv_heads, block, dim, dtype=dtype)
    expected_keys, expected_values = keys.float(), values.float()
    expected = projected.clone()
    query, key, value = expected.split((heads, kv_heads, kv_heads), dim=1)
    rope(query, positions, cos_sin)
    rope(key, positions, cos_sin)
    kv_write(key.to(dtype).float(), value.to(dtype).float(), expected_keys, expected_values, slots)
    rope_kv_write(projected, kv_heads, positions, cos_sin, keys, values, slots)
    assert torch.equal(projected, expected)
    assert torch.equal(keys.float(), expected_keys) and torch.equal(values.float(), expected_values)
