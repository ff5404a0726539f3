"""Products in 8 bits stay close to those in float32, and each row's answer is its own."""

import pytest
import torch

from kernels.w8a8 import linear_w8a8, quantize_rows


@pytest.mark.parametrize(("dtype", "error"), [(torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 2**-4)])
def test_quantized_rows_are_close(dtype, error):
    x = torch.randn(5, 40) * torch.tensor([[1e-3], [1.0], [100.0], [0.0], [1.0]])
    q, scales = quantize_rows(x, dtype)
    assert q.dtype == dtype
    assert ((q.float() * scales[:, None] - x).abs() <= x.abs().amax(1, keepdim=True) * error * 1.001).all()


def test_linear_in_8_bits():
    x, weight, bias = torch.randn(4, 256), torch.randn(30, 256), torch.randn(30)
    q, scales = quantize_rows(weight, torch.int8)
    out = linear_w8a8(x, q, scales, bias)
    exact = x @ weight.T + bias
    assert (out - exact).norm() < 0.02 * exact.norm()
    assert torch.equal(linear_w8a8(x[1:2], q, scales, bias), out[1:2])
