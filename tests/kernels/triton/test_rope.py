"""Queries and keys turned in one launch, in place, inside a fused projection."""

import pytest
import torch

from kernels import reference
from kernels.triton.rope import rope

ERROR = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}  # the reference rounds angles and products too


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (17, 1, 20), (1, 1, 2)])
def test_rope(device, dtype, heads, kv_heads, head_dim):
    fused = torch.randn(6, heads + 2 * kv_heads, head_dim, device=device).to(dtype)
    angles = torch.rand(50, head_dim // 2, device=device) * 100
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.tensor([0, 49, 3, 4, 5, 3], device=device)
    expected = fused.clone()
    rope(fused[:, :-kv_heads], positions, cos_sin)
    reference.rope(expected[:, :-kv_heads], positions, cos_sin)
    torch.testing.assert_close(fused, expected, atol=ERROR[dtype], rtol=ERROR[dtype])
    assert torch.equal(fused[:, -kv_heads:], expected[:, -kv_heads:])  # the values
