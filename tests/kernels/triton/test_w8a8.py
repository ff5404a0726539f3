"""Products in 8 bits: int8 sums are exact, so that results have the reference's bits up to the last rounding."""

import pytest
import torch

from kernels import reference
from kernels.triton import w8a8
from kernels.triton.w8a8 import Tile, linear_w8a8, quantize_rows
from tests.kernels.triton.conftest import ON_GPU


@pytest.fixture
def small_tiles(monkeypatch):
    for limit in w8a8.TILES:
        monkeypatch.setitem(w8a8.TILES, limit, Tile(16, 32, 32, 4, 2))


def weight_of(out_features, in_features, dtype, device):
    return reference.quantize_rows(torch.randn(out_features, in_features, device=device), dtype)


def test_rows_are_quantized_as_by_the_reference(device, dtype):
    x = (torch.randn(5, 300, device=device) * torch.tensor([[1e-4], [1], [30], [0], [5]], device=device)).to(dtype)[:, :259]
    q, scales = quantize_rows(x, torch.int8)
    expected, expected_scales = reference.quantize_rows(x, torch.int8)
    assert torch.equal(q, expected) and torch.equal(scales, expected_scales)
    assert q.abs().amax(1).tolist() == [127, 127, 127, 0, 127]


def test_halves_are_rounded_to_even(device):
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.4999]], device=device)
    assert quantize_rows(x, torch.int8)[0].tolist() == [[127, 0, 2, 2, 0, -2, 3]]


def test_a_row_that_is_not_finite_stays_so_and_alone(device, small_tiles):
    x = torch.ones(3, 32, device=device)
    x[0, 3], x[2, 5] = torch.nan, torch.inf
    weight = weight_of(32, 32, torch.int8, device)
    for linear in (linear_w8a8, reference.linear_w8a8):
        out = linear(x, *weight)
        assert torch.isnan(out).all(1).tolist() == [True, False, True]
        assert torch.isfinite(out[1]).all()


@pytest.mark.parametrize(("rows", "in_features", "out_features", "has_bias"), [(3, 96, 64, False), (37, 50, 45, True)])
def test_int8_equals_reference(device, dtype, small_tiles, rows, in_features, out_features, has_bias):
    x = torch.randn(rows, in_features + 7, device=device).to(dtype)[:, :in_features]
    weight, scales = weight_of(out_features, in_features, torch.int8, device)
    bias = torch.randn(out_features, device=device).to(dtype) if has_bias else None
    out = linear_w8a8(x, weight, scales, bias)
    assert out.dtype == dtype
    torch.testing.assert_close(out, reference.linear_w8a8(x, weight, scales, bias), atol=1e-6, rtol=1e-6)
    assert torch.equal(linear_w8a8(x[2:3], weight, scales, bias), out[2:3])


def test_tiles_of_the_table(device):
    for rows in (2, 20, 70):
        x = torch.randn(rows, 300, device=device)
        weight = weight_of(130, 300, torch.int8, device)
        torch.testing.assert_close(linear_w8a8(x, *weight), reference.linear_w8a8(x, *weight), atol=1e-6, rtol=1e-6)


def test_float8_equals_reference(device, monkeypatch, small_tiles):
    if ON_GPU and torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("float8 products need sm_90")
    if not ON_GPU:  # the interpreter rounds to float8 otherwise than GPUs and torch
        monkeypatch.setattr(w8a8, "quantize_rows", reference.quantize_rows)
    x = torch.randn(19, 70, device=device)
    weight = weight_of(45, 70, torch.float8_e4m3fn, device)
    torch.testing.assert_close(linear_w8a8(x, *weight), reference.linear_w8a8(x, *weight), atol=2e-3, rtol=1e-3)
