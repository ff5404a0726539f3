"""Presence, frequency and repetition penalties on logits, from the token ids a row holds.

Presence and frequency look at the output (OpenAI's definition, https://platform.openai.com/docs/api-reference/completions),
repetition at prompt and output (CTRL, Keskar et al. 2019, arXiv 1909.05858).
"""

from __future__ import annotations

import torch

from kernels import device
from kernels.cpu.penalties import penalize


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
    penalize(*(x.numpy() for x in arguments))
