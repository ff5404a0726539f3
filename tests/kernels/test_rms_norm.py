"""RMS norm against its reference."""

import pytest
import torch

from kernels import reference
from kernels.rms_norm import add_rms_norm, rms_norm


@pytest.mark.parametrize("hidden", [1, 16, 123, 576])
def test_rms_norm(hidden):
    x, residual, weight = torch.randn(6, hidden), torch.randn(6, hidden), torch.randn(hidden)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    summed = residual.clone()
    out = add_rms_norm(x, summed, weight, 1e-5)
    assert torch.equal(summed, residual + x)
    torch.testing.assert_close(out, reference.rms_norm(residual + x, weight, 1e-5))
    assert torch.equal(add_rms_norm(x[3:4], residual[3:4].clone(), weight, 1e-5), out[3:4]), "a row depends on itself alone"


def test_rms_norm_of_a_strided_view_and_bfloat16():
    x, weight = torch.randn(3, 4, 16)[:, 1:3], torch.randn(16)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    torch.testing.assert_close(
        rms_norm(x.bfloat16(), weight.bfloat16(), 1e-6).float(), rms_norm(x, weight, 1e-6), atol=3e-2, rtol=2e-2
    )
