"""Writing keys and values into slots."""

import pytest
import torch

from kernels import reference
from kernels.kv_write import kv_write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_write_from_slices_of_a_fused_projection(dtype):
    fused = torch.randn(5, 2 * 3 * 8).to(dtype)
    key, value = (x.view(5, 3, 8) for x in fused.split(24, dim=1))
    slots = torch.tensor([16, 5, 31, -1, 40])
    caches = [torch.zeros(4, 3, 8, 16, dtype=dtype), torch.zeros(4, 3, 16, 8, dtype=dtype)]
    expected = [x.clone() for x in caches]
    kv_write(key, value, *caches, slots)
    reference.kv_write(key, value, *expected, slots)
    assert torch.equal(caches[0], expected[0]) and torch.equal(caches[1], expected[1])
    assert torch.equal(caches[0][2, :, :, 8], key[4])
    assert not caches[0][3].any() and not caches[1][3].any()  # slot -1: stored nowhere
