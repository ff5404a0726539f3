"""Normalisation of whole rows, of heads inside a fused projection, and after adding a residual."""

import pytest
import torch

from kernels import reference
from kernels.triton.rms_norm import add_rms_norm, rms_norm

ERROR = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # relative: one unit in the last place


@pytest.mark.parametrize("hidden", [1, 48, 576, 4096])
def test_rows(device, dtype, hidden):
    x, weight = torch.randn(5, hidden, device=device).to(dtype), torch.randn(hidden, device=device).to(dtype)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), atol=1e-6, rtol=ERROR[dtype])


def test_heads_of_a_fused_projection(device, dtype):
    x, weight = torch.randn(35, 6, 24, device=device).to(dtype)[:, 1:4, :20], torch.randn(20, device=device).to(dtype)
    out = rms_norm(x, weight, 1e-5)
    assert out.is_contiguous()
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-5), atol=1e-6, rtol=ERROR[dtype])


@pytest.mark.parametrize("hidden", [48, 576, 4096])
def test_add(device, dtype, hidden):
    x, residual = (torch.randn(7, hidden, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(hidden, device=device).to(dtype)
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
    torch.testing.assert_close(add_rms_norm(x, residual, weight, 1e-5), expected, atol=1e-6, rtol=ERROR[dtype])
    assert torch.equal(residual, expected_residual)


def test_no_rows(device, dtype):
    assert rms_norm(torch.empty(0, 8, dtype=dtype, device=device), torch.ones(8, dtype=dtype, device=device), 1e-5).shape == (0, 8)
