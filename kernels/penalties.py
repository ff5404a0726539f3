"""Presence, frequency and repetition penalties on logits, from the token ids a row holds.

Presence and frequency look at the output (OpenAI's definition, https://platform.openai.com/docs/api-reference/completions),
repetition at prompt and output (CTRL, Keskar et al. 2019, arXiv 1909.05858).
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from kernels import device


def apply_penalties(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    num_prompt_tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Changes logits in place: first a seen token's logit is divided (positive) or multiplied (negative) by `repetition`, then
    `frequency * count + presence` is taken off every token of the output.

    logits            [num_rows, vocab] float32
    token_ids         [max_rows, max_len] int32; row rows[i] holds logits[i]'s prompt and output
    rows, num_prompt_tokens, num_tokens        [num_rows] int32
    presence, frequency, repetition            [num_rows] float32; 0, 0, 1 leave a row as it is
    """
    arguments = (logits, token_ids, rows, num_prompt_tokens, num_tokens, presence, frequency, repetition)
    if device.on_accelerator(logits):
        device.accelerated("penalties", "apply_penalties")(*arguments)
        return
    _apply(*(x.numpy() for x in arguments))


@numba.njit(cache=True, nogil=True)
def _apply(logits, token_ids, rows, num_prompt_tokens, num_tokens, presence, frequency, repetition):
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
