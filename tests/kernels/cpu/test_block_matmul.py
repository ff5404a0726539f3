"""The product with quantized blocks: near the exact one by what 8 bits of activations allow, and the same bits everywhere."""

import hashlib

import numpy as np
import pytest
import torch

from kernels.cpu.block_kinds import KINDS
from kernels.cpu.block_matmul import pack_blocks
from kernels.cpu.block_rows import block_rows
from kernels.cpu.ir import features
from kernels.cpu.project import PackedWeight, matmul
from kernels.cpu.quantized_blocks import Blocks, Scales, join_rows, quantize, zeros_like
from tests.kernels.cpu.instruction_sets import digest_with_avx2

SHAPES = [(960, 576), (33, 192), (200, 64)]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.bits}-{kind.size}-{kind.span}-{kind.is_symmetric}")


def block_matmul(x, packed):
    return matmul(x, PackedWeight(packed.records, packed.out_features, packed.in_features, packed.segments))


def make_scales(rows, columns, size, span, generator):
    if not span:
        return Scales(torch.rand(rows, columns // size, generator=generator).half().float().numpy())
    numbers = torch.randint(0, 64, (rows, columns // size), generator=generator).float().numpy()
    return Scales(numbers, (torch.rand(rows, columns // span, generator=generator) / 64).half().float().numpy())


def make_blocks(rows, columns, kind, generator):
    """Random ones of a kind, of as many columns as its records allow, at least one record."""
    columns = max(1, columns // kind.columns) * kind.columns
    codes = torch.randint(0, 1 << kind.bits, (rows, columns), generator=generator).numpy().astype(np.uint8)
    scales = make_scales(rows, columns, kind.size, kind.span, generator)
    minima = None
    if not kind.is_symmetric:
        minima = make_scales(rows, columns, kind.size, kind.span, generator)
        middle = np.float32(-(1 << (kind.bits - 1)))
        if minima.factors is None:
            minima.numbers *= middle
        else:
            minima.factors *= middle
    return Blocks(codes, kind.bits, scales, minima)


def products(generator):
    """(blocks, x, product) of every kind."""
    for kind in KINDS:
        for rows, columns in SHAPES:
            blocks = make_blocks(rows, columns, kind, generator)
            packed = pack_blocks([blocks])
            for count in (1, 2, 3, 4, 5, 6, 7, 13, 64):
                x = torch.randn(count, blocks.codes.shape[1], generator=generator)
                yield blocks, x, block_matmul(x, packed)


def digest():
    hasher = hashlib.sha256()
    for _, _, product in products(torch.Generator().manual_seed(0)):
        hasher.update(product.numpy().tobytes())
    return hasher.hexdigest()


def relative_error(product, exact):
    return float((product - exact).norm() / exact.norm())


def test_it_is_near_the_exact_product():
    for blocks, x, product in products(torch.Generator().manual_seed(0)):
        assert relative_error(product, x.double() @ torch.from_numpy(blocks.values()).double().T) < 0.012


@EVERY_KIND
def test_what_8_bits_hold_is_multiplied_exactly(kind):
    """Activations that are whole numbers of a block's scale: nothing is rounded but float32 sums."""
    generator = torch.Generator().manual_seed(1)
    blocks = make_blocks(40, 512, kind, generator)
    x = torch.randint(-127, 128, (9, blocks.codes.shape[1]), generator=generator).float()
    x[:, :: kind.block] = 127.0
    exact = x.double() @ torch.from_numpy(blocks.values()).double().T
    assert relative_error(block_matmul(x, pack_blocks([blocks])), exact) < 1e-6


@pytest.mark.skipif(not {"avx2", "fma"} <= features(), reason="compares instruction sets of x86 processors with AVX2")
def test_without_avx512_the_bits_are_the_same():
    assert digest_with_avx2(__name__) == digest()


@EVERY_KIND
def test_a_row_has_the_same_bits_in_every_batch(kind):
    generator = torch.Generator().manual_seed(2)
    blocks = make_blocks(96, 64, kind, generator)
    packed = pack_blocks([blocks])
    x = torch.randn(40, blocks.codes.shape[1], generator=generator)
    together = block_matmul(x, packed)
    for rows in range(1, 20):
        assert torch.equal(block_matmul(x[11 : 11 + rows], packed), together[11 : 11 + rows])


@EVERY_KIND
def test_rows_are_read_back(kind):
    blocks = make_blocks(70, 64, kind, torch.Generator().manual_seed(3))
    rows = block_rows(pack_blocks([blocks]), torch.tensor([69, 0, 33]))
    np.testing.assert_allclose(rows.numpy(), blocks.values()[[69, 0, 33]], rtol=1e-6, atol=1e-6)


@EVERY_KIND
def test_few_more_bytes_are_kept_than_the_file_has(kind):
    """A whole number that the file packs in 6 bits takes 8, which a processor reads as they are."""
    columns = 1024
    packed = pack_blocks([make_blocks(64, columns, kind, torch.Generator().manual_seed(4))])
    numbers = (1 if kind.is_symmetric else 2) * (8 / kind.size + 16 / kind.span if kind.span else 16 / kind.size)
    assert packed.records.nbytes * 8 / (64 * columns) == kind.bits + numbers


def test_scales_that_their_layout_does_not_hold_are_refused():
    blocks = make_blocks(4, 64, KINDS[0], torch.Generator().manual_seed(8))
    blocks.scales.numbers += np.float32(1e-5)
    with pytest.raises(ValueError, match="more bits than their layout keeps"):
        pack_blocks([blocks])


def test_blocks_that_no_kernel_has_are_refused():
    generator = torch.Generator().manual_seed(8)
    blocks = make_blocks(4, 64, KINDS[0], generator)
    blocks.bits = 3
    with pytest.raises(ValueError, match="no product with blocks of 32 columns and 3 bits"):
        pack_blocks([blocks])
    with pytest.raises(ValueError, match="no product of rows with blocks of different width"):
        pack_blocks([make_blocks(4, 64, kind, generator) for kind in (KINDS[0], KINDS[-1])])


def test_matrices_of_several_kinds_are_multiplied_together():
    generator = torch.Generator().manual_seed(5)
    parts = [make_blocks(rows, 256, kind, generator) for rows, kind in zip((5, 16, 33, 7, 40), (*KINDS[3:8],), strict=True)]
    parts.insert(1, make_blocks(20, 256, KINDS[3], generator))
    joined = join_rows(parts)
    assert [len(each.codes) for each in joined] == [25, 16, 33, 7, 40]  # those of one kind became one
    packed = pack_blocks(joined)
    x = torch.randn(11, 256, generator=generator)
    expected = torch.cat([block_matmul(x, pack_blocks([part])) for part in parts], dim=1)
    assert torch.equal(block_matmul(x, packed), expected)
    values = np.concatenate([part.values() for part in parts])
    indices = torch.tensor([120, 0, 24, 25, 41, 80, 81])
    np.testing.assert_array_equal(block_rows(packed, indices).numpy(), values[indices])


@EVERY_KIND
def test_columns_are_cut_between_blocks(kind):
    blocks = make_blocks(4, 3 * kind.columns, kind, torch.Generator().manual_seed(6))
    np.testing.assert_array_equal(blocks.columns(kind.columns, 3 * kind.columns).values(), blocks.values()[:, kind.columns :])
    with pytest.raises(ValueError, match="cut through blocks of"):
        blocks.columns(8, kind.columns)


@EVERY_KIND
def test_rows_of_zeros(kind):
    zeros = zeros_like(make_blocks(4, 512, kind, torch.Generator().manual_seed(9)), 3)
    assert zeros.values().shape == (3, 512)
    assert not zeros.values().any()
    assert not block_matmul(torch.randn(2, 512), pack_blocks([zeros])).any()


def test_8_bits_are_nearest_and_fill_up_the_last_block():
    weight = torch.randn(7, 100, generator=torch.Generator().manual_seed(7)).numpy()
    values = quantize(weight).values()
    assert values.shape == (7, 128)
    assert not values[:, 100:].any()
    assert np.abs(values[:, :100] - weight).max() < np.abs(weight).max() / 127


def test_zeros_and_what_is_not_a_number():
    packed = pack_blocks([quantize(torch.randn(40, 64).numpy())])
    x = torch.randn(4, 64)
    x[0] = 0.0
    x[1, 50] = torch.nan
    x[2, 3] = -torch.inf
    product = block_matmul(x, packed)
    assert not product[0].any()
    assert product[1:3].isnan().all()
    assert product[3].isfinite().all()
