"""The loop of `apply_token_mask` on the CPU."""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiled import compiled


@compiled()
def keep_allowed(logits, rows, masks):
    vocab = logits.shape[1]
    for i in range(rows.shape[0]):
        row = logits[rows[i]]
        for word in range(masks.shape[1]):
            bits = masks[i, word]
            if bits == -1:
                continue
            some = row[word * 32 : min(word * 32 + 32, vocab)]
            for t in range(np.int32(some.shape[0])):  # without a branch: vector instructions
                some[t] = some[t] if (bits >> np.int32(t)) & np.int32(1) else np.float32(-np.inf)
