"""A decoder layer on the CPU in two compiled calls, before and after attention: the operations of their own files in a row.

Called one by one from Python, the dozen operations of a layer cost more than they compute where a step has few tokens.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from kernels.cpu import bfloat_matmul, block_matmul, half_matmul, panel_matmul
from kernels.cpu.compiled import compiled
from kernels.cpu.rms_norm import add_normalize
from kernels.cpu.rope_kv_write import rotate_and_write
from kernels.cpu.silu_mul import gate

_multiply_panels = panel_matmul.multiply
_pack_rows, _round_rows, _num_pairs = half_matmul.pack_rows, bfloat_matmul.round_rows, bfloat_matmul.num_pairs
_multiply_blocks, _quantize_rows, _count_panels = block_matmul.multiply, block_matmul.quantize_rows, block_matmul.count_panels


def project(out, x, weight, segments):
    """out [rows, out_features] = x [rows, in_features] times packed weights: panels of 16 bits, or segments of records."""
    raise NotImplementedError("for compiled code only")


@overload(project)
def _project(out, x, weight, segments):
    if weight.dtype == types.int16:
        return _project_half
    if weight.dtype == types.uint32:
        return _project_bfloat
    return _project_blocks


def _project_half(out, x, weight, segments):
    packed = np.empty(x.size, np.float32)
    _pack_rows(packed, x)
    _multiply_panels(out, packed, weight, 0, len(weight))


def _project_bfloat(out, x, weight, segments):
    words = np.empty(len(x) * _num_pairs(x.shape[1]), np.uint32)
    _round_rows(words, x)
    _multiply_panels(out, words, weight, 0, len(weight))


def _project_blocks(out, x, weight, segments):
    words = _quantize_rows(x, segments)
    _multiply_blocks(out, words, weight, segments, 0, _count_panels(segments))


@compiled()
def before_attention(
    heads, hidden, residual, norm, epsilon, qkv, qkv_segments, num_kv_heads, positions, cos_sin, key_cache,
    value_cache, slots,
):  # fmt: skip
    """Norm, projection to heads [tokens, heads, head_dim], turning, and the new KV in the cache. `residual` grows by `hidden`."""
    normed = np.empty_like(hidden)
    add_normalize(normed, hidden, residual, norm, epsilon)
    project(heads.reshape(len(heads), -1), normed, qkv, qkv_segments)
    rotate_and_write(heads, num_kv_heads, positions, cos_sin, key_cache, value_cache, slots)


@compiled()
def after_attention(
    hidden, attended, residual, norm, epsilon, output, output_segments, gate_up, gate_up_segments,
    intermediate, down, down_segments,
):  # fmt: skip
    """Output projection, norm and MLP: `hidden` becomes what the next layer adds to `residual`."""
    normed = np.empty_like(hidden)
    gates = np.empty((len(hidden), 2 * intermediate), np.float32)
    project(hidden, attended.reshape(len(hidden), -1), output, output_segments)
    add_normalize(normed, hidden, residual, norm, epsilon)
    project(gates, normed, gate_up, gate_up_segments)
    gated = np.empty((len(hidden), intermediate), np.float32)
    gate(gated, gates)
    project(hidden, gated, down, down_segments)
