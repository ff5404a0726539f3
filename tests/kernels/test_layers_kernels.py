"""kv_write, rms_norm, rope and silu_mul against their references, and the vectorised float32 functions against numpy."""

import numba
import numpy as np
import pytest
import torch

from kernels import reference
from kernels.cpu_math import exp_float32, log_float32, widen
from kernels.kv_write import kv_write
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rope
from kernels.silu_mul import silu_mul


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_write_from_slices_of_a_fused_projection(dtype):
    fused = torch.randn(5, 2 * 3 * 8).to(dtype)
    key, value = (x.view(5, 3, 8) for x in fused.split(24, dim=1))
    slots = torch.tensor([16, 5, 31, 63, 40])
    caches = [torch.zeros(4, 3, 8, 16, dtype=dtype), torch.zeros(4, 3, 16, 8, dtype=dtype)]
    expected = [x.clone() for x in caches]
    kv_write(key, value, *caches, slots)
    reference.kv_write(key, value, *expected, slots)
    assert torch.equal(caches[0], expected[0]) and torch.equal(caches[1], expected[1])
    assert torch.equal(caches[0][2, :, :, 8], key[4])


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


def test_rope_turns_a_slice_in_place():
    fused = torch.randn(4, 5 * 16)
    before = fused.clone()
    cos_sin = torch.randn(50, 16)
    positions = torch.tensor([0, 49, 3, 3])
    rope(fused[:, 16:64].view(4, 3, 16), positions, cos_sin)
    expected = before[:, 16:64].clone().view(4, 3, 16)
    reference.rope(expected, positions, cos_sin)
    torch.testing.assert_close(fused[:, 16:64].reshape(4, 3, 16), expected)
    assert torch.equal(fused[:, :16], before[:, :16]) and torch.equal(fused[:, 64:], before[:, 64:])


def test_silu_mul():
    gate_up = torch.randn(3, 246) * 20
    torch.testing.assert_close(silu_mul(gate_up), reference.silu_mul(gate_up), atol=1e-6, rtol=2e-6)


@numba.njit
def _map_exp(x, out):
    for i in range(len(x)):
        out[i] = exp_float32(x[i])


@numba.njit
def _map_log(x, out):
    for i in range(len(x)):
        out[i] = log_float32(x[i])


@numba.njit
def _map_widen(x, out):
    for i in range(len(x)):
        out[i] = widen(x[i])


def test_exp_within_three_ulp_and_its_edges():
    x = np.linspace(-86, 87, 200_001, dtype=np.float32)
    out = np.empty_like(x)
    _map_exp(x, out)
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=4e-7)
    edges = np.array([-np.inf, -1000, 0, np.nan], np.float32)
    out = np.empty_like(edges)
    _map_exp(edges, out)
    assert 0 <= out[0] < 1e-37 and 0 <= out[1] < 1e-37 and out[2] == 1 and np.isnan(out[3])


def test_log_within_two_ulp_and_equal_to_its_reference():
    x = np.concatenate([np.logspace(-37, 37, 100_001), 1 - np.logspace(-7.2, -0.1, 1001)]).astype(np.float32)
    out = np.empty_like(x)
    _map_log(x, out)
    np.testing.assert_allclose(out, np.log(x.astype(np.float64)), rtol=3e-7, atol=1e-10)
    assert np.array_equal(out, reference.log_float32(torch.from_numpy(x)).numpy())


def test_widen_reads_bfloat16_bits():
    x = torch.randn(64).bfloat16()
    out = np.empty(64, np.float32)
    _map_widen(x.view(torch.uint16).numpy(), out)
    assert np.array_equal(out, x.float().numpy())
