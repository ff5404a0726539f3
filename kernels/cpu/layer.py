"""Decoder layers on the CPU in one compiled call: the operations of their own files in a row.

Called one by one from Python, the dozen operations of a layer cost more than they compute where a step has few tokens.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu import crew, project
from kernels.cpu.attention import attend, make_tiles
from kernels.cpu.compiled import compiled
from kernels.cpu.rms_norm import add_normalize
from kernels.cpu.rope_kv_write import rotate_and_write
from kernels.cpu.silu_mul import gate

ROWS = 128  # that go through the MLP together: what lies between its products stays in the cache

_project, _wait_for, _put = project.project, crew.wait_for, crew.put


@compiled()
def run_layers(
    hidden, residual, layers, caches, positions, cos_sin, slots, tables, num_heads, tile_tokens, attention_task, board, first, pace,
    ahead,
):  # fmt: skip
    """`hidden` [tokens, hidden], what the layer before made, becomes what the last layer makes; neither is in `residual` yet.

    layers          of each a norm's weight and epsilon, the operands (`project`) of query, key and value; the same of the second
                    norm, then operands of output, gate and up, the MLP's width, operands of down, attention's scale and window
    caches          of each its keys and values, by `cpu.math.elements`
    positions       [tokens] int64; cos_sin, slots as in `kernels.rope_kv_write`, tables as in `attention.attend`
    first           number of the first layer
    pace, ahead     arrays of one number, or of none: layers whose KV stands in the cache, of this part of a step and of the part
                    before it, which is waited for
    """
    keys, _ = caches[0]
    num_tokens, num_kv_heads, head_dim = len(hidden), keys.shape[1], keys.shape[2]
    heads = np.empty((num_tokens, num_heads + 2 * num_kv_heads, head_dim), np.float32)
    attended = np.empty((num_tokens, num_heads, head_dim), np.float32)
    all_heads, all_attended = heads.reshape(num_tokens, -1), attended.reshape(num_tokens, -1)
    normed = np.empty((min(ROWS, num_tokens), hidden.shape[1]), np.float32)
    tiles = make_tiles(tables[2], tile_tokens)
    for i in range(len(layers)):
        norm, epsilon, qkv, qkv_segments, qkv_task = layers[i][0]
        for begin in range(0, num_tokens, ROWS):
            end = min(begin + ROWS, num_tokens)
            some = normed[: end - begin]
            add_normalize(some, hidden[begin:end], residual[begin:end], norm, epsilon)
            _project(all_heads[begin:end], some, qkv, qkv_segments, qkv_task, board)
        keys, values = caches[i]
        rotate_and_write(heads, num_kv_heads, positions, cos_sin, keys, values, slots)
        if len(pace):
            if len(ahead):
                _wait_for(ahead, first + i + 1)
            _put(pace, 0, first + i + 1)
        scale, window = layers[i][3]
        attend(attended, heads, keys, values, tables, tiles, tile_tokens, scale, np.float32(0.0), window, board, attention_task)
        norm, epsilon, output, output_segments, output_task = layers[i][1]
        gate_up, gate_up_segments, gate_up_task, width, down, down_segments, down_task = layers[i][2]
        gates, gated = np.empty((len(normed), 2 * width), np.float32), np.empty((len(normed), width), np.float32)
        for begin in range(0, num_tokens, ROWS):
            end = min(begin + ROWS, num_tokens)
            count, out = end - begin, hidden[begin:end]
            _project(out, all_attended[begin:end], output, output_segments, output_task, board)
            add_normalize(normed[:count], out, residual[begin:end], norm, epsilon)
            _project(gates[:count], normed[:count], gate_up, gate_up_segments, gate_up_task, board)
            gate(gated[:count], gates[:count])
            _project(out, gated[:count], down, down_segments, down_task, board)
