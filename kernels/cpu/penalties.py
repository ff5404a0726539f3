"""The loop of `apply_penalties` on the CPU."""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiled import compiled


@compiled()
def penalize(logits, token_ids, rows, num_prompt_tokens, num_tokens, presence, frequency, repetition):
    # Counts are made anew for each row from its tokens: nothing to keep right through preemption, and cheap beside a forward pass.
    seen = np.zeros(logits.shape[1], np.bool_)
    counts = np.zeros(logits.shape[1], np.int32)  # in the output
    for i in range(logits.shape[0]):
        if presence[i] == 0 and frequency[i] == 0 and repetition[i] == 1:
            continue
        tokens = token_ids[rows[i], : num_tokens[i]]
        for p in range(num_prompt_tokens[i], num_tokens[i]):
            counts[tokens[p]] += 1
        for p in range(num_tokens[i]):
            token = tokens[p]
            if seen[token]:
                continue
            seen[token] = True
            logit = logits[i, token]
            logit = logit / repetition[i] if logit > 0 else logit * repetition[i]
            if counts[token] > 0:
                logit -= frequency[i] * np.float32(counts[token])
                logit -= presence[i]
            logits[i, token] = logit
        for p in range(num_tokens[i]):
            seen[tokens[p]] = False
            counts[tokens[p]] = 0
