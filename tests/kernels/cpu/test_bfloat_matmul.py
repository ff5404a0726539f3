"""The product with bfloat16 weights: exactly the sums that its docstring says, at every number of rows, by every instruction."""

import hashlib

import pytest
import torch

from kernels.cpu.bfloat_matmul import bfloat_rows, pack_bfloat
from kernels.cpu.ir import features
from kernels.cpu.project import PackedWeight, matmul
from tests.kernels.cpu.instruction_sets import digest_with_avx2

SHAPES = [(960, 576), (33, 101), (200, 48), (1, 7), (64, 1)]


def bfloat_matmul(x, packed, out_features):
    return matmul(x, PackedWeight(packed, out_features, x.shape[1]))


def products():
    """(x, weight, product) by shape and number of rows."""
    generator = torch.Generator().manual_seed(1)
    for out_features, in_features in SHAPES:
        weight = torch.randn(out_features, in_features, generator=generator).bfloat16()
        packed = pack_bfloat(weight)
        for rows in [*range(1, 14), 64]:
            x = torch.randn(rows, in_features, generator=generator)
            yield x, weight, bfloat_matmul(x, packed, out_features)


def digest():
    hasher = hashlib.sha256()
    for _, _, product in products():
        hasher.update(product.numpy().tobytes())
    return hasher.hexdigest()


def sum_in_pairs(x, weight):
    """Each pair's second product first, each added to the sum in one rounding: float64 holds products and sums of two exactly."""
    x, weight = x.bfloat16().double(), weight.double()
    total = torch.zeros(len(x), len(weight))
    for pair in range(0, x.shape[1], 2):
        for k in range(min(pair + 1, x.shape[1] - 1), pair - 1, -1):
            total = (total.double() + x[:, k : k + 1] * weight[:, k]).float()
    return total


def test_it_is_the_sum_in_pairs():
    for x, weight, product in products():
        assert torch.equal(product, sum_in_pairs(x, weight))


@pytest.mark.skipif(not {"avx2", "fma"} <= features(), reason="compares instruction sets of x86 processors with AVX2")
def test_without_avx512_the_bits_are_the_same():
    assert digest_with_avx2(__name__) == digest()


def test_a_row_has_the_same_bits_in_every_batch():
    generator = torch.Generator().manual_seed(2)
    packed = pack_bfloat(torch.randn(96, 65, generator=generator).bfloat16())
    x = torch.randn(40, 65, generator=generator)
    together = bfloat_matmul(x, packed, 96)
    for rows in range(1, 20):
        assert torch.equal(bfloat_matmul(x[11 : 11 + rows], packed, 96), together[11 : 11 + rows])


def test_rows_are_read_back():
    weight = torch.randn(70, 33, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.equal(bfloat_rows(pack_bfloat(weight), torch.tensor([69, 0, 33]))[:, :33], weight[[69, 0, 33]].float())


def test_zeros_and_what_is_not_a_number():
    packed = pack_bfloat(torch.ones(40, 64).bfloat16())
    x = torch.ones(4, 64)
    x[0] = 0.0
    x[1, 50] = torch.nan
    x[2, 3] = -torch.inf
    product = bfloat_matmul(x, packed, 40)
    assert not product[0].any()
    assert product[1].isnan().all()
    assert (product[2] == -torch.inf).all()
    assert (product[3] == 64).all()
    assert bfloat_matmul(x[:0], packed, 40).shape == (0, 40)
