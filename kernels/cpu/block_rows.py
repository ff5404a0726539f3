"""Rows of packed blocks read back as float32: an embedding is one row of a matrix that is also multiplied."""

from __future__ import annotations

import numpy as np
import torch

from kernels.cpu.block_kinds import GROUP, KINDS
from kernels.cpu.block_matmul import PANEL, PackedBlocks
from kernels.cpu.compiled import compiled
from kernels.cpu.ir import LANES
from kernels.cpu.math import widen

_X_BLOCKS = tuple(kind.block for kind in KINDS)
_RECORD_BYTES = tuple(kind.record_bytes for kind in KINDS)
_RECORD_BLOCKS = tuple(kind.blocks for kind in KINDS)
_CODE_BYTES = tuple(kind.code_bytes for kind in KINDS)
_NUM_BITS = tuple(kind.bits for kind in KINDS)
_SIZES = tuple(kind.size for kind in KINDS)
_SPANS = tuple(kind.span for kind in KINDS)
_MIDDLES = tuple(1 << kind.middle_shift if kind.is_symmetric else 0 for kind in KINDS)
_MINIMA_OFFSETS = tuple(kind.minima_offset for kind in KINDS)
_FACTORS_OFFSETS = tuple(kind.factors_offset for kind in KINDS)


def block_rows(packed: PackedBlocks, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` [n] int64 of the weight that was packed, as float32 [n, in_features]."""
    out = np.empty((len(indices), packed.in_features), np.float32)
    _take_rows(out, packed.records, packed.segments, indices.numpy())
    return torch.from_numpy(out)


@compiled()
def _take_rows(out, records, segments, indices):
    for i in range(len(indices)):
        s = 0
        while indices[i] >= segments[s, 3]:
            s += 1
        kind, row = segments[s, 0], indices[i] - segments[s, 2]
        panel_bytes = segments[s, 5] * _RECORD_BYTES[kind]
        start = segments[s, 4] + row // PANEL * panel_bytes
        panel = records[start : start + panel_bytes].reshape(segments[s, 5], _RECORD_BYTES[kind])
        _take_row(out[i], panel, kind, row % PANEL)


@compiled()
def _take_row(out, panel, kind, lane):
    block_size, num_blocks, size = _X_BLOCKS[kind], _RECORD_BLOCKS[kind], _SIZES[kind]
    scales_offset, minima_offset, factors_offset = num_blocks * _CODE_BYTES[kind], _MINIMA_OFFSETS[kind], _FACTORS_OFFSETS[kind]
    middle = np.float32(_MIDDLES[kind])
    width = block_size * num_blocks
    for b in range(len(panel)):
        record = panel[b]
        factor = minimum_factor = np.float32(1.0)
        if _SPANS[kind]:
            factor = _half_at(record, factors_offset + 2 * lane)
            if not middle:
                minimum_factor = _half_at(record, factors_offset + 2 * (PANEL + lane))
        for k in range(width):
            code = _code_at(record, k // block_size * _CODE_BYTES[kind], _NUM_BITS[kind], block_size // GROUP, k % block_size, lane)
            number = k // size * PANEL + lane
            scale = factor * _number_at(record, scales_offset, number, _SPANS[kind] > 0)
            value = (np.float32(code) - middle) * scale
            if not middle:
                value += minimum_factor * _number_at(record, minima_offset, number, _SPANS[kind] > 0)
            out[b * width + k] = value


@compiled()
def _number_at(record, offset, number, is_whole):
    if is_whole:
        return np.float32(np.int8(record[offset + number]))
    return _half_at(record, offset + 2 * number)


@compiled()
def _half_at(record, place):
    return widen(np.int16(np.uint16(record[place]) | np.uint16(record[place + 1]) << np.uint16(8)))


@compiled()
def _code_at(record, begin, bits, groups, k, lane):
    """Code of column `k` of the block whose codes begin at record[begin]."""
    chunk, group = 4 * LANES, k // GROUP
    byte = lane * GROUP + k % GROUP  # of a line
    if bits == 8:
        return np.int32(record[begin + group * chunk + byte])
    half = groups // 2
    low = np.int32(record[begin + group % half * chunk + byte]) >> np.int32(4 * (group // half)) & np.int32(15)
    begin += half * chunk
    if bits == 5:
        high = np.int32(record[begin + group * (chunk // 8) + byte // 8]) >> np.int32(byte % 8) & np.int32(1)
    elif bits == 6:
        high = np.int32(record[begin + group // 4 * chunk + byte]) >> np.int32(2 * (group % 4)) & np.int32(3)
    else:
        high = np.int32(0)
    return low | high << np.int32(4)
