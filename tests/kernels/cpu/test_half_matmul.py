"""The product with 16-bit weights beside torch's, at every number of rows that a tile may have."""

import pytest
import torch

from kernels.cpu.half_matmul import half_rows, pack_half
from kernels.cpu.project import PackedWeight, matmul


def half_matmul(x, packed, out_features):
    return matmul(x, PackedWeight(packed, out_features, x.shape[1]))


@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (33, 100), (200, 48), (1, 7), (64, 1)])
def test_it_is_the_product_with_rounded_weights(out_features, in_features):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out_features, in_features, generator=generator).half()
    packed = pack_half(weight)
    for rows in [*range(1, 14), 64, 129]:
        x = torch.randn(rows, in_features, generator=generator)
        product = half_matmul(x, packed, out_features)
        exact = x.double() @ weight.double().T
        torch.testing.assert_close(product.double(), exact, atol=1e-5 * in_features, rtol=1e-5)
        assert torch.equal(half_matmul(x[rows // 2 :], packed, out_features), product[rows // 2 :]), "its bits hang on other rows"
    assert torch.equal(half_rows(packed, torch.tensor([0, out_features - 1])), weight[[0, -1]].float())


def test_no_rows():
    assert half_matmul(torch.zeros(0, 8), pack_half(torch.ones(3, 8).half()), 3).shape == (0, 3)
