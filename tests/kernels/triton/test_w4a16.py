"""Products with 4-bit weights: every group has its own scale, and none is applied to another's weights."""

import pytest
import torch

from kernels import reference
from kernels.triton import w4a16
from kernels.triton.w4a16 import Tile, linear_w4a16
from kernels.w4a16 import pack_int4

ERROR = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}  # of sums of about a hundred products


@pytest.fixture
def small_tiles(monkeypatch):
    for key in w4a16.TILES:
        monkeypatch.setitem(w4a16.TILES, key, Tile(32, 16, 4, 2))
    monkeypatch.setattr(w4a16, "MAX_DEPTH", 32)


@pytest.mark.parametrize(
    ("rows", "in_features", "out_features", "group_size", "is_symmetric"),
    [(3, 96, 64, 32, True), (19, 384, 45, 128, False), (1, 192, 33, 96, False), (2, 160, 32, 160, True)],
)
def test_equals_reference(device, dtype, small_tiles, rows, in_features, out_features, group_size, is_symmetric):
    x = torch.randn(rows, in_features + 5, device=device).to(dtype)[:, :in_features]
    packed = pack_int4(torch.randint(0, 16, (out_features, in_features), device=device), group_size)
    num_groups = in_features // group_size
    scales = torch.rand(num_groups, out_features, device=device).to(dtype) * 0.1
    zeros = None if is_symmetric else (torch.rand(num_groups, out_features, device=device) * 15).to(dtype)
    bias = None if is_symmetric else torch.randn(out_features, device=device).to(dtype)
    out = linear_w4a16(x, packed, scales, zeros, bias)
    assert out.dtype == dtype
    expected = reference.linear_w4a16(x, packed, scales, zeros, bias)
    torch.testing.assert_close(out, expected, atol=ERROR[dtype], rtol=1e-3)


def test_tiles_of_the_table(device, dtype):
    for rows in (2, 20, 70):
        x = torch.randn(rows, 128, device=device).to(dtype)
        packed = torch.randint(0, 256, (130, 64), dtype=torch.uint8, device=device)
        scales = torch.rand(1, 130, device=device) * 0.1
        torch.testing.assert_close(
            linear_w4a16(x, packed, scales), reference.linear_w4a16(x, packed, scales), atol=ERROR[dtype], rtol=1e-3
        )


@pytest.mark.parametrize("has_bias", [False, True])
def test_parts_add_up(device, dtype, small_tiles, monkeypatch, has_bias):
    monkeypatch.setattr(w4a16, "MIN_STEPS", 1)
    assert w4a16._num_parts(3, tiles=3, steps=7) == 7
    x = torch.randn(3, 7 * 64, device=device).to(dtype)
    packed = torch.randint(0, 256, (70, 7 * 32), dtype=torch.uint8, device=device)
    scales = torch.rand(7, 70, device=device) * 0.1
    bias = torch.randn(70, device=device).to(dtype) if has_bias else None
    expected = reference.linear_w4a16(x, packed, scales, None, bias)
    for most in (7, 3):  # parts of the same length, and a shorter last one
        monkeypatch.setattr(w4a16, "MAX_PARTS", most)
        torch.testing.assert_close(linear_w4a16(x, packed, scales, None, bias), expected, atol=ERROR[dtype], rtol=1e-3)


def test_groups_that_no_step_fits_are_refused(device):
    with pytest.raises(ValueError, match="multiple of 32"):
        linear_w4a16(torch.ones(1, 48), torch.zeros(2, 24, dtype=torch.uint8), torch.ones(2, 2))
