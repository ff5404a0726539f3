"""Layers that a rank holds a shard of: linear by columns and by rows, embedding and output head by vocabulary.

A column-parallel layer's outputs, a row-parallel layer's inputs are this rank's part; the latter's outputs are summed over ranks,
as in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053). A column-parallel layer is a `gpu.models.linear.Linear` as it is.
"""

from __future__ import annotations

import torch

from gpu.distributed import TensorParallelGroup
from gpu.models.linear import Linear
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


class RowParallelLinear:
    """`linear` holds this rank's columns of the weight, [out_features, in_features of this rank]; its bias on rank 0 alone."""

    def __init__(self, linear: Linear, group: TensorParallelGroup) -> None:
        self.linear = linear
        self.group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(self.linear(x))


class VocabParallelEmbedding:
    """`table` holds the rows of this rank's part of the vocabulary, with zeros to equal width: [shard_width, hidden]."""

    def __init__(self, table: Linear, vocab_size: int, group: TensorParallelGroup) -> None:
        self.table = table
        self.group = group
        self.shard = group.shard(vocab_size)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [num_tokens] int64; returns [num_tokens, hidden] in the activations' type, memory of its own."""
        if self.group.size == 1:
            return self.table.rows(token_ids)
        local = token_ids - self.shard.start
        width = self.shard.stop - self.shard.start
        mine = (local >= 0) & (local < width)
        embedded = self.table.rows(local.clamp(0, width - 1))
        return self.group.all_reduce(embedded.masked_fill_(~mine.unsqueeze(1), 0.0))


class VocabParallelHead:
    """The output projection; `linear` has this rank's rows, as `VocabParallelEmbedding` has them."""

    def __init__(self, linear: Linear, vocab_size: int, group: TensorParallelGroup) -> None:
        self.linear = linear
        self.vocab_size = vocab_size
        self.group = group

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden]; returns [rows, vocab_size] float32, the same bits on every rank."""
        return self.group.all_gather(self.linear(hidden))[:, : self.vocab_size].float().contiguous()
