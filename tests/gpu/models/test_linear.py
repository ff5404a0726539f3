"""Numeric classes: what they round, that a row's product depends on that row alone, and what they may not change."""

import numpy as np
import pytest
import torch

from gpu.models.linear import PlainLinear, make_linear
from gpu.numerics import Numerics
from kernels.cpu import pairs

CPU = torch.device("cpu")
FLOAT16 = Numerics.choose("float16", "none", CPU)
BFLOAT16 = Numerics.choose("bfloat16", "none", CPU)
INT8 = Numerics.choose("auto", "int8", CPU)
SHAPES = [(960, 576), (576, 1536), (200, 48), (33, 100), (64, 7)]  # [out_features, in_features]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_case(out_features, in_features, rows=300, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
    bias = torch.randn(out_features, generator=generator)
    x = torch.randn(rows, in_features, generator=generator) * torch.rand(rows, 1, generator=generator) * 10
    return weight, bias, x


def relative_error(got, expected):
    return float((got - expected).double().norm() / expected.double().norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("numerics", [FLOAT16, BFLOAT16, INT8], ids=str)
def test_a_row_has_the_same_bits_in_every_batch(numerics, shape):
    weight, bias, x = make_case(*shape)
    linear = make_linear(weight, bias, numerics)
    together = linear(x)
    for rows in [*range(1, 34), 64, 100, 119, 120, 121, 129, 240]:
        for first in (0, 17, 59):
            assert torch.equal(linear(x[first : first + rows]), together[first : first + rows]), f"{rows} rows from {first}"


@pytest.mark.parametrize("shape", SHAPES)
def test_float16_rounds_weights_and_nothing_else(shape):
    weight, bias, x = make_case(*shape)
    exact = x.double() @ weight.half().double().T + bias.half().double()
    assert relative_error(make_linear(weight, bias, FLOAT16)(x).double(), exact) < 3e-4  # the bias may be kept whole
    without_bias = x.double() @ weight.half().double().T
    assert relative_error(make_linear(weight, None, FLOAT16)(x).double(), without_bias) < 1e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_rounds_weights_and_rows(shape):
    weight, _, x = make_case(*shape)
    exact = x.bfloat16().double() @ weight.bfloat16().double().T
    linear = make_linear(weight, None, BFLOAT16)
    assert relative_error(linear(x).double(), exact) < 1e-6
    assert torch.equal(linear.rows(torch.tensor([shape[0] - 1, 0])), weight[[-1, 0]].bfloat16().float())


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_near_and_an_outlier_does_not_spoil_it(shape):
    weight, bias, x = make_case(*shape)
    expected = x @ weight.T + bias
    assert relative_error(make_linear(weight, bias, INT8)(x), expected) < 0.01
    if shape[1] >= 512:
        x[:, 5] *= 30  # a channel such as language models have: it costs its block precision, and no other
        assert relative_error(make_linear(weight, bias, INT8)(x), x @ weight.T + bias) < 0.02


def test_int8_rows_of_zeros_nan_and_extremes():
    weight, _, x = make_case(64, 128, rows=5)
    x[0] = 0.0
    x[1, 3] = torch.nan
    x[2, 3] = torch.inf
    x[3] *= 1e20
    product = make_linear(weight, None, INT8)(x)
    assert not product[0].any()
    assert product[1:3].isnan().all()
    assert relative_error(product[3:], x[3:] @ weight.T) < 0.02


def test_choice_by_options(monkeypatch):
    monkeypatch.setattr(pairs, "is_fast", lambda: False)

    def choose(dtype, quantization="none", device=CPU, has_blocks=False):
        return Numerics.choose(dtype, quantization, device, has_blocks)

    assert choose("auto") == Numerics(torch.float16, torch.float32)
    assert choose("float32") == Numerics(torch.float32, torch.float32)
    assert choose("bfloat16") == Numerics(torch.bfloat16, torch.float32)
    assert choose("auto", device=torch.device("cuda")) == Numerics(torch.bfloat16, torch.bfloat16)
    assert choose("float16", device=torch.device("cuda")) == Numerics(torch.float16, torch.float16)
    assert choose("bfloat16", "int8") == Numerics(torch.bfloat16, torch.float32, "int8")
    with pytest.raises(ValueError, match="int8 is for the CPU"):
        choose("auto", "int8", torch.device("cuda"))
    names = {str(choose(*options)) for options in [("auto",), ("float32",), ("bfloat16",), ("auto", "int8"), ("float32", "int8")]}
    assert len(names) == 5
    monkeypatch.setattr(pairs, "is_fast", lambda: True)
    assert choose("auto") == choose("bfloat16")
    assert choose("auto", "int8") == Numerics(torch.float16, torch.float32, "int8")
    for has_blocks in (False, True):  # what is asked for is never changed
        assert choose("float16", "auto", has_blocks=has_blocks) == choose("float16")
        assert choose("auto", "none", has_blocks=has_blocks) == choose("auto", "auto") == choose("bfloat16")
        assert choose("auto", "auto", torch.device("cuda"), has_blocks) == choose("auto", device=torch.device("cuda"))
    assert choose("auto", "auto", has_blocks=True) == choose("auto", "gguf") == Numerics(torch.float16, torch.float32, "gguf")


def test_bytes_kept():
    weight, _, _ = make_case(960, 576)
    kinds = {"float32": 4, "float16": 2, "bfloat16": 2}
    for name, width in kinds.items():
        assert make_linear(weight, None, Numerics.choose(name, "none", CPU)).num_bytes == width * weight.numel()
    assert make_linear(weight, None, INT8).num_bytes == weight.numel() * (1 + 2 / 64), "a 16-bit number a block of 64"
    assert isinstance(make_linear(weight, None, Numerics.choose("float32", "none", CPU)), PlainLinear)


def test_float32_rows_differ_in_their_last_bits_only():
    weight, bias, x = make_case(960, 576)
    linear = PlainLinear(weight, bias)
    together = linear(x)
    for rows in (1, 7, 16):  # MKL's products of few rows sum in another order
        np.testing.assert_allclose(linear(x[:rows]), together[:rows], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("numerics", [FLOAT16, INT8, Numerics.choose("float32", "none", CPU)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_the_weight_itself(numerics, shape):
    """The embedding is read out of the head's matrix: what a unit vector's product is."""
    weight, _, _ = make_case(*shape)
    linear = make_linear(weight, None, numerics)
    indices = torch.tensor([shape[0] - 1, 0, 5, 0])
    torch.testing.assert_close(linear.rows(indices), weight[indices], atol=0.02, rtol=0.0)
    units = linear(torch.eye(shape[1])).T[indices]  # exact in 8 bits
    torch.testing.assert_close(linear.rows(indices), units, atol=1e-6, rtol=1e-5)
    assert linear.rows(indices).is_contiguous()
