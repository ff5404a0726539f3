"""The transform is its own inverse up to its order, and what rows are scaled by comes back."""

import pytest
import torch

from kernels.row_scale import hadamard, hadamard_order, scale_rows, to_range


@pytest.mark.parametrize(("columns", "order"), [(576, 64), (1536, 128), (4096, 512), (16, 2), (100, 4), (7, 1), (8, 1)])
def test_twice_is_the_order(columns, order):
    assert hadamard_order(columns) == order
    x = torch.randn(5, columns)
    torch.testing.assert_close(hadamard(hadamard(x)), order * x, atol=1e-4 * order, rtol=1e-5)


def test_products_are_kept_and_an_outlier_is_spread():
    x, y = torch.randn(3, 576), torch.randn(4, 576)
    torch.testing.assert_close(hadamard(x) @ hadamard(y).T / 64, x @ y.T, atol=1e-3, rtol=1e-4)
    one = torch.zeros(1, 576)
    one[0, 100] = 1.0
    spread = hadamard(one)
    assert spread.abs().max() == 1.0 and spread.count_nonzero() == 64


def test_to_range_and_back():
    x = torch.randn(6, 576) * torch.tensor([1.0, 1e-6, 1e6, 3.0, 0.0, 1.0]).unsqueeze(1)
    x[5, 1] = torch.inf
    scaled, factors = to_range(x, 127.0)
    torch.testing.assert_close(scaled[:4].abs().amax(dim=1), torch.full((4,), 127.0))
    assert not scaled[4:].any() and factors[4] == 0 and factors[5].isnan()
    bias = torch.randn(576)
    back = scaled.clone()
    scale_rows(back, factors, bias)
    torch.testing.assert_close(back[:4], hadamard(x[:4]) + bias, rtol=1e-5, atol=1e-3)
    scale_rows(scaled, factors, None)
    torch.testing.assert_close(scaled[:4] + bias, back[:4])
