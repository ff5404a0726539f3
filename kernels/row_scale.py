"""Scales of rows for matrix products in 8 bits: each row of activations is brought to one range, its products get the scale back.

A row's scale comes from that row alone, so that its answer does not depend on the rows beside it.
"""

from __future__ import annotations

import numba
import numpy as np
import torch


def to_range(x: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, columns] float32 on the CPU; returns (x * limit / the row's largest magnitude, [rows] the inverse factors).

    A row of zeros stays zero. A row with NaN or infinity becomes NaN as a whole through its factor.
    """
    scaled = torch.empty_like(x)
    factors = torch.empty(x.shape[0])
    _to_range(scaled.numpy(), factors.numpy(), x.numpy(), np.float32(limit))
    return scaled, factors


def scale_rows(x: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor | None) -> None:
    """x [rows, columns] float32 times factors [rows], plus bias [columns], in place."""
    if bias is None:
        _scale(x.numpy(), factors.numpy())
    else:
        _scale_and_add(x.numpy(), factors.numpy(), bias.numpy())


# The maximum of magnitudes is the same in every order: lanes may take it.
@numba.njit(cache=True, nogil=True, error_model="numpy")
def _to_range(scaled, factors, x, limit):
    for row in range(x.shape[0]):
        highest = np.uint32(0)
        for i in range(x.shape[1]):  # as integers, magnitudes are ordered like floats, NaN above all
            highest = max(highest, np.float32(x[row, i]).view(np.uint32) & np.uint32(0x7FFFFFFF))
        if highest >= np.uint32(0x7F800000):
            factors[row] = np.nan
            scaled[row] = np.float32(0.0)
            continue
        magnitude = np.uint32(highest).view(np.float32)
        factors[row] = magnitude / limit
        scale = limit / magnitude if magnitude > np.float32(1e-30) else np.float32(0.0)
        for i in range(x.shape[1]):
            scaled[row, i] = x[row, i] * scale


@numba.njit(cache=True, nogil=True)
def _scale(x, factors):
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[row, i] *= factors[row]


@numba.njit(cache=True, nogil=True)
def _scale_and_add(x, factors, bias):
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[row, i] = x[row, i] * factors[row] + bias[i]
