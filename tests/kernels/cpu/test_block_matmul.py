"""The product with quantized blocks: near the exact one by what 8 bits of activations allow, and the same bits everywhere."""

import hashlib

import numpy as np
import pytest
import torch

from kernels.cpu.block_matmul import block_matmul, block_rows, pack_blocks
from kernels.cpu.ir import features
from kernels.cpu.quantized_blocks import Blocks, join_rows, quantize
from tests.kernels.cpu.instruction_sets import digest_with_avx2

KINDS = [(4, 32), (8, 32), (8, 16), (8, 64)]  # bits, block size
SHAPES = [(960, 576), (33, 192), (200, 64)]


def make_blocks(rows, columns, bits, block_size, generator, halves=True):
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator).numpy().astype(np.uint8)
    scales = torch.rand(rows, columns // block_size, generator=generator).numpy()
    if halves:
        scales = scales.astype(np.float16).astype(np.float32)
    return Blocks(codes, scales, -float(1 << (bits - 1)) * scales, bits)


def products(generator):
    """(blocks, x, product) of every kind."""
    for bits, block_size in KINDS:
        for rows, columns in SHAPES:
            for halves in (True, False):
                blocks = make_blocks(rows, columns, bits, block_size, generator, halves)
                packed = pack_blocks(blocks)
                for count in (1, 2, 3, 4, 5, 6, 7, 13, 64):
                    x = torch.randn(count, columns, generator=generator)
                    yield blocks, x, block_matmul(x, packed, rows)


def digest():
    hasher = hashlib.sha256()
    for _, _, product in products(torch.Generator().manual_seed(0)):
        hasher.update(product.numpy().tobytes())
    return hasher.hexdigest()


def test_it_is_near_the_exact_product():
    for blocks, x, product in products(torch.Generator().manual_seed(0)):
        exact = x.double() @ torch.from_numpy(blocks.values()).double().T
        assert float((product - exact).norm() / exact.norm()) < 0.01


@pytest.mark.skipif(not {"avx2", "fma"} <= features(), reason="compares instruction sets of x86 processors with AVX2")
def test_without_avx512_the_bits_are_the_same():
    assert digest_with_avx2(__name__) == digest()


@pytest.mark.parametrize(("bits", "block_size"), KINDS)
def test_a_row_has_the_same_bits_in_every_batch(bits, block_size):
    generator = torch.Generator().manual_seed(2)
    packed = pack_blocks(make_blocks(96, 64, bits, block_size, generator))
    x = torch.randn(40, 64, generator=generator)
    together = block_matmul(x, packed, 96)
    for rows in range(1, 20):
        assert torch.equal(block_matmul(x[11 : 11 + rows], packed, 96), together[11 : 11 + rows])


@pytest.mark.parametrize(("bits", "block_size"), KINDS)
def test_rows_are_read_back(bits, block_size):
    blocks = make_blocks(70, 64, bits, block_size, torch.Generator().manual_seed(3))
    rows = block_rows(pack_blocks(blocks), torch.tensor([69, 0, 33]))
    np.testing.assert_allclose(rows.numpy(), blocks.values()[[69, 0, 33]], rtol=1e-6, atol=1e-6)


def test_scales_that_16_bits_do_not_hold_are_kept_whole():
    generator = torch.Generator().manual_seed(4)
    assert pack_blocks(make_blocks(32, 64, 4, 32, generator)).scales.dtype == np.int16
    assert pack_blocks(make_blocks(32, 64, 4, 32, generator, halves=False)).scales.dtype == np.float32


def test_blocks_that_no_kernel_has_are_refused():
    blocks = make_blocks(4, 64, 8, 64, torch.Generator().manual_seed(8))
    blocks.minima = blocks.minima + 1
    for each in (blocks, make_blocks(4, 64, 4, 64, torch.Generator().manual_seed(8))):
        with pytest.raises(ValueError, match="no product with blocks of 64 columns"):
            pack_blocks(each)


def test_joined_rows_keep_their_values():
    generator = torch.Generator().manual_seed(5)
    parts = [make_blocks(5, 64, *kind, generator) for kind in KINDS]
    joined = join_rows(parts)
    assert (joined.bits, joined.block_size) == (8, 16)
    np.testing.assert_array_equal(joined.values(), np.concatenate([part.values() for part in parts]))


def test_columns_are_cut_between_blocks():
    blocks = make_blocks(4, 96, 4, 32, torch.Generator().manual_seed(6))
    np.testing.assert_array_equal(blocks.columns(32, 96).values(), blocks.values()[:, 32:])
    with pytest.raises(ValueError, match="cut through blocks of 32"):
        blocks.columns(16, 96)


def test_8_bits_are_nearest_and_fill_up_the_last_block():
    weight = torch.randn(7, 100, generator=torch.Generator().manual_seed(7)).numpy()
    values = quantize(weight).values()
    assert values.shape == (7, 128)
    assert not values[:, 100:].any()
    assert np.abs(values[:, :100] - weight).max() < np.abs(weight).max() / 127


def test_zeros_and_what_is_not_a_number():
    packed = pack_blocks(quantize(torch.randn(40, 64).numpy()))
    x = torch.randn(4, 64)
    x[0] = 0.0
    x[1, 50] = torch.nan
    x[2, 3] = -torch.inf
    product = block_matmul(x, packed, 40)
    assert not product[0].any()
    assert product[1:3].isnan().all()
    assert product[3].isfinite().all()
