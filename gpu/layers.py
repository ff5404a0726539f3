"""Layers that a rank holds a shard of: linear by columns and by rows, embedding and output head by vocabulary.

A column-parallel layer's outputs, a row-parallel layer's inputs are this rank's part; the latter's outputs are summed over ranks,
as in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu.distributed import TensorParallelGroup
from kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm:
    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self.weight = weight  # [hidden]
        self.epsilon = epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.epsilon)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual += x in place; returns the norm of residual."""
        return add_rms_norm(x, residual, self.weight, self.epsilon)


class ColumnParallelLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight  # [out_features of this rank, in_features]
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, group: TensorParallelGroup) -> None:
        self.weight = weight  # [out_features, in_features of this rank]
        self.bias = bias if group.rank == 0 else None  # added once
        self.group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(F.linear(x, self.weight, self.bias))


class VocabParallelEmbedding:
    """weight: [shard_width, hidden], the rows of this rank's part of the vocabulary, padded with zeros to equal width."""

    def __init__(self, weight: torch.Tensor, vocab_size: int, group: TensorParallelGroup) -> None:
        self.weight = weight
        self.group = group
        self.first = group.shard(vocab_size).start

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [num_tokens] int64; returns [num_tokens, hidden], memory of its own."""
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.first
        mine = (local >= 0) & (local < self.weight.shape[0])
        embedded = F.embedding(local.clamp(0, self.weight.shape[0] - 1), self.weight)
        return self.group.all_reduce(embedded.masked_fill_(~mine.unsqueeze(1), 0.0))


class VocabParallelHead:
    """The output projection; weight as `VocabParallelEmbedding`'s, which may be the same tensor."""

    def __init__(self, weight: torch.Tensor, vocab_size: int, group: TensorParallelGroup) -> None:
        self.weight = weight
        self.vocab_size = vocab_size
        self.group = group

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden]; returns [rows, vocab_size] float32, the same bits on every rank."""
        return self.group.all_gather(F.linear(hidden, self.weight))[:, : self.vocab_size].float().contiguous()
