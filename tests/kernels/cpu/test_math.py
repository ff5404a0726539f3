"""The vectorised float32 functions against numpy."""

import numba
import numpy as np
import torch

from kernels import reference
from kernels.cpu.math import exp_float32, log_float32, widen


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
