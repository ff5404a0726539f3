"""The attention layer over the paged cache, and what a step tells it."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention import paged_attention
from kernels.cpu import crew
from kernels.rope_kv_write import rope_kv_write


class Pace:
    """In how many layers a part of a step has written its KV, which a later part of the same step waits for."""

    def __init__(self) -> None:
        self.layers = np.zeros(1, np.int64)

    def advance(self) -> None:
        self.layers[0] += 1

    def give_up(self) -> None:
        """Wake all that wait: the part has failed, and the step with it."""
        self.layers[0] = sys.maxsize

    def wait(self, layers: int) -> None:
        crew.wait_for(self.layers, layers)


_NO_PACE = np.zeros(0, np.int64)


@dataclass
class AttentionMetadata:
    """Which tokens of a step belong to which request, and where their KV stands; one for all layers. Tensors on the device."""

    block_tables: torch.Tensor  # [max_rows, max_blocks] int32
    rows: torch.Tensor  # [num_requests] int32, into block_tables
    query_start: torch.Tensor  # [num_requests + 1] int32, first token of each request
    context_lens: torch.Tensor  # [num_requests] int32, tokens in the cache when this step's are written
    slots: torch.Tensor  # [num_tokens] int64, where each token's KV goes
    pace: Pace | None = None  # this part's, where a step is computed in parts that may read one another's KV
    ahead: Pace | None = None  # that of the part before

    @functools.cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """block_tables, rows, query_start and context_lens on the CPU, as numpy's."""
        return tuple(x.numpy() for x in (self.block_tables, self.rows, self.query_start, self.context_lens))

    def wrote_layer(self) -> None:
        """This part's KV of one layer more stands in the cache; returns when that of the parts before does too."""
        if self.pace is not None:
            if self.ahead is not None:
                self.ahead.wait(int(self.pace.layers[0]) + 1)
            self.pace.advance()

    @property
    def paces(self) -> tuple[np.ndarray, np.ndarray]:
        """`pace` and `ahead` as compiled code takes them."""
        own, before = (_NO_PACE if pace is None else pace.layers for pace in (self.pace, self.ahead))
        return own, before


class PagedAttention:
    """`num_heads` query heads over `num_kv_heads` key-value heads of this rank. window: tokens seen, the own included; 0: all."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, window: int) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.window = window

    def __call__(
        self,
        heads: torch.Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values
        positions: torch.Tensor,  # [num_tokens] int64
        cos_sin: torch.Tensor,  # [num_positions, head_dim], as kernels.rope has it
        cache: tuple[torch.Tensor, torch.Tensor],
        step: AttentionMetadata,
    ) -> torch.Tensor:
        """Turns queries and keys in place, writes the new KV, attends; returns [num_tokens, num_heads * head_dim]."""
        key_cache, value_cache = cache
        rope_kv_write(heads, self.num_kv_heads, positions, cos_sin, key_cache, value_cache, step.slots)
        step.wrote_layer()
        out = paged_attention(
            heads[:, : self.num_heads],
            key_cache,
            value_cache,
            step.block_tables,
            step.rows,
            step.query_start,
            step.context_lens,
            self.scale,
            self.window,
        )
        return out.view(-1, self.num_heads * self.head_dim)
