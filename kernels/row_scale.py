"""Activations for matrix products in 8 bits: each row spread by a rotation and brought to one range.

A few channels of a language model's activations are some 20 times larger than the rest, which 8 bits with one scale would leave
little of. A Hadamard transform spreads each over many channels (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456); weights that were
transformed alike undo it. A row's scale comes from that row alone, so that its answer does not depend on the rows beside it.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

SHORTEST_RUN = 8  # columns next to each other that are transformed alike: fewer would leave vector lanes empty


def hadamard_order(columns: int) -> int:
    """Over how many channels each is spread: the largest power of two that leaves runs of SHORTEST_RUN columns or more."""
    order = 1
    while columns % (2 * order) == 0 and columns // (2 * order) >= SHORTEST_RUN:
        order *= 2
    return order


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [rows, columns] float32 on the CPU times the Sylvester matrix of order `hadamard_order(columns)`; twice: x times the order.

    Column i is mixed with those that differ from it by multiples of columns / order.
    """
    transformed = x.clone(memory_format=torch.contiguous_format)
    _transform_all(transformed.numpy(), hadamard_order(x.shape[1]))
    return transformed


def to_range(x: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, columns] float32 on the CPU, contiguous: (hadamard(x) times limit / a row's largest magnitude, the inverse factors).

    A row of zeros stays zero. A row with NaN or infinity becomes NaN as a whole through its factor.
    """
    scaled = torch.empty_like(x)
    factors = torch.empty(x.shape[0])
    _to_range(scaled.numpy(), factors.numpy(), x.numpy(), np.float32(limit), hadamard_order(x.shape[1]))
    return scaled, factors


def scale_rows(x: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor | None) -> None:
    """x [rows, columns] float32 times factors [rows], plus bias [columns], in place."""
    if bias is None:
        _scale(x.numpy(), factors.numpy())
    else:
        _scale_and_add(x.numpy(), factors.numpy(), bias.numpy())


@numba.njit(cache=True, nogil=True)
def _transform(row, order):
    stride = len(row) // order
    while stride < len(row):
        for begin in range(0, len(row), 2 * stride):
            low, high = row[begin : begin + stride], row[begin + stride : begin + 2 * stride]
            for i in range(stride):
                a, b = low[i], high[i]
                low[i] = a + b
                high[i] = a - b
        stride *= 2


@numba.njit(cache=True, nogil=True)
def _transform_all(x, order):
    for row in range(x.shape[0]):
        _transform(x[row], order)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _to_range(scaled, factors, x, limit, order):
    for row in range(x.shape[0]):
        out = scaled[row]
        for i in range(x.shape[1]):
            out[i] = x[row, i]
        _transform(out, order)
        highest = np.int32(0)
        for i in range(x.shape[1]):  # as integers, magnitudes are ordered like floats, NaN above all
            highest = max(highest, np.int32(np.float32(out[i]).view(np.int32) & np.int32(0x7FFFFFFF)))
        if highest >= np.int32(0x7F800000):
            factors[row] = np.nan
            out[:] = np.float32(0.0)
            continue
        magnitude = np.int32(highest).view(np.float32)
        factors[row] = magnitude / limit
        scale = limit / magnitude if magnitude > np.float32(1e-30) else np.float32(0.0)
        for i in range(x.shape[1]):
            out[i] *= scale


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
