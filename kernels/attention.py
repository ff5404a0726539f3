"""Attention of new tokens over the paged KV cache: prefill chunks and decodes in one batch, grouped-query heads, causal, optional
sliding window and soft cap.

Online softmax over blocks in ascending order (Milakov and Gimelshein 2018, arXiv 1805.02867; tiled as in FlashAttention-2, arXiv
2307.08691). A token's result depends on its own query and its own KV alone, in a fixed order of summation: the same bits in every
batch and every chunking. Blocks are read where they lie. A bfloat16 cache is multiplied pair by pair (`cpu.pairs`), for which
queries and weights are rounded to bfloat16 too; sums are float32.
"""

from __future__ import annotations

import torch

from kernels import device
from kernels.cpu.math import elements
from kernels.cpu.step_attention import attend_step


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attends `query`; the KV of its tokens stands in the cache already. Returns [num_tokens, num_heads, head_dim], query's dtype.

    query        [num_tokens, num_heads, head_dim], tokens of a request adjacent
    key_cache    [num_blocks, num_kv_heads, head_dim, block_size]; transposed, so that 16 scores are one vector
    value_cache  [num_blocks, num_kv_heads, block_size, head_dim]
    block_tables [max_rows, max_blocks] int32
    rows         [num_requests] int32, a request's row in block_tables
    query_start  [num_requests + 1] int32, first token of each request
    context_lens [num_requests] int32, tokens in the cache, the query's included: token j of a request with q query tokens has the
                 position context_len - q + j and sees positions up to its own
    window       a token sees itself and the window - 1 before it; 0: all
    soft_cap     scores become soft_cap * tanh(score / soft_cap) before the softmax (Gemma 2, arXiv 2408.00118); 0: as they are
    """
    if device.on_accelerator(query):
        return device.accelerated("attention", "paged_attention")(
            query, key_cache, value_cache, block_tables, rows, query_start, context_lens, scale, window, soft_cap
        )
    arrays = tuple(x.numpy() for x in (block_tables, rows, query_start, context_lens))
    keys, values = elements(key_cache), elements(value_cache)
    attended = attend_step(query.to(torch.float32).numpy(), keys, values, arrays, scale, window, soft_cap)
    return torch.from_numpy(attended).to(query.dtype)
