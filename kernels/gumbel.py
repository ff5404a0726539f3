"""Sampling by the Gumbel-max trick: argmax(logits + noise) is a draw from softmax(logits) (Gumbel 1954).

The noise of a token comes from the counter-based generator Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3"): key = the request's seed, counter = (token id // 4, position), word token id % 4. It depends on (seed, position, token
id) alone, so that a request draws the same tokens in every batch, after every preemption and on every device: only correctly
rounded float32 operations follow, in a fixed order.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels import device
from kernels.cpu.gumbel import draw, fill_all


def gumbel_argmax(logits: torch.Tensor, greedy: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draws a token a row; the lowest id among equals. Tokens at -inf are never drawn unless all are.

    logits    [num_rows, vocab] float32, temperature and filters applied
    greedy    [num_rows] bool: argmax without noise
    seeds     [num_rows] int64
    positions [num_rows] int64: the index that the drawn token will have in its request
    Returns [num_rows] int64.
    """
    if device.on_accelerator(logits):
        return device.accelerated("gumbel", "gumbel_argmax")(logits, greedy, seeds, positions)
    drawn = torch.empty(logits.shape[0], dtype=torch.int64)
    draw(drawn.numpy(), logits.numpy(), greedy.numpy(), seeds.numpy(), positions.numpy())
    return drawn


def gumbel_noise(seed: int, position: int, num_tokens: int) -> torch.Tensor:
    """The noise of tokens 0..num_tokens-1, [num_tokens] float32, by the CPU's code."""
    noise = np.empty(num_tokens, np.float32)
    fill_all(noise, np.uint64(seed & 0xFFFFFFFFFFFFFFFF), np.uint64(position))
    return torch.from_numpy(noise)
