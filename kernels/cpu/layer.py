"""Decoder layers on the CPU in one compiled call: the operations of their own files in a row.

Called one by one from Python, the dozen operations of a layer cost more than they compute where a step has few tokens.
"""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray

from kernels.cpu.attention import attend, make_tiles
from kernels.cpu.compiled import compiled
from kernels.cpu.crew import pointer_like, put, wait_for
from kernels.cpu.project import project
from kernels.cpu.rms_norm import add_normalize
from kernels.cpu.rope_kv_write import rotate_and_write
from kernels.cpu.silu_mul import gate

ROWS = 128  # that go through the MLP together: what lies between its products stays in the cache


@compiled()
def run_layers(
    hidden, residual, norms, epsilons, weights, widths, scales, windows, caches, like_keys, like_values, positions, cos_sin, slots,
    tables, num_heads, tile_tokens, attention_task, board, pace, ahead,
):  # fmt: skip
    """`hidden` [tokens, hidden], what the layer before made, becomes what the last layer makes; neither is in `residual` yet.

    norms           [layers, 2, hidden], weights of the norms before attention and before the MLP; epsilons [layers, 2]
    weights         [layers, 4, ...] descriptions (`project`): of query, key and value; output; gate and up; down
    widths          [layers], of the MLP; scales and windows [layers], of attention
    caches          [layers, 2], addresses of keys and values, which are of the type and shape of `like_keys` and `like_values`
    positions       [tokens] int64; cos_sin, slots as in `kernels.rope_kv_write`, tables as in `attention.attend`
    pace, ahead     arrays of one number, or of none: layers whose KV stands in the cache, of this part of a step and of the part
                    before it, which is waited for
    """
    num_tokens, num_kv_heads, head_dim = len(hidden), like_keys.shape[1], like_keys.shape[2]
    heads = np.empty((num_tokens, num_heads + 2 * num_kv_heads, head_dim), np.float32)
    attended = np.empty((num_tokens, num_heads, head_dim), np.float32)
    all_heads, all_attended = heads.reshape(num_tokens, -1), attended.reshape(num_tokens, -1)
    normed = np.empty((min(ROWS, num_tokens), hidden.shape[1]), np.float32)
    tiles = make_tiles(tables[2], tile_tokens)
    for i in range(len(norms)):
        for begin in range(0, num_tokens, ROWS):
            end = min(begin + ROWS, num_tokens)
            some = normed[: end - begin]
            add_normalize(some, hidden[begin:end], residual[begin:end], norms[i, 0], epsilons[i, 0])
            project(all_heads[begin:end], some, weights[i, 0], board)
        keys = carray(pointer_like(caches[i, 0], like_keys), like_keys.shape)
        values = carray(pointer_like(caches[i, 1], like_values), like_values.shape)
        rotate_and_write(heads, num_kv_heads, positions, cos_sin, keys, values, slots)
        if len(pace):
            if len(ahead):
                wait_for(ahead, i + 1)
            put(pace, 0, i + 1)
        attend(
            attended, heads, keys, values, tables, tiles, tile_tokens, scales[i], np.float32(0.0), windows[i], board, attention_task
        )
        gates, gated = np.empty((len(normed), 2 * widths[i]), np.float32), np.empty((len(normed), widths[i]), np.float32)
        for begin in range(0, num_tokens, ROWS):
            end = min(begin + ROWS, num_tokens)
            count, out = end - begin, hidden[begin:end]
            project(out, all_attended[begin:end], weights[i, 1], board)
            add_normalize(normed[:count], out, residual[begin:end], norms[i, 1], epsilons[i, 1])
            project(gates[:count], normed[:count], weights[i, 2], board)
            gate(gated[:count], gates[:count])
            project(out, gated[:count], weights[i, 3], board)
