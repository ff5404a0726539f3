"""Makes layers of a rank's shard of a checkpoint on its device, keeping count of bytes and progress."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu.distributed import TensorParallelGroup
from gpu.layers import RowParallelLinear, VocabParallelEmbedding, VocabParallelHead
from gpu.linear import Linear, Numerics, make_linear
from gpu.weights import Checkpoint


class ShardReader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        numerics: Numerics,
        device: torch.device,
        group: TensorParallelGroup,
        progress: Callable[[float], None],
    ) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.numerics = numerics
        self.device = device
        self.group = group
        self.num_bytes = 0
        self._progress = progress
        self._names = frozenset(checkpoint.names())
        self._num_read = 0

    def has(self, name: str) -> bool:
        return name in self._names

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight, whole on every rank."""
        return self._keep(self._read(name, dtype=self.numerics.activations))

    def column_parallel(self, *names: str) -> Linear:
        """This rank's outputs of each of the layers `names`, the first's before the second's."""
        shards = [self.group.shard(self.checkpoint.shapes[f"{name}.weight"][0]) for name in names]
        bias = None
        if self.has(names[0] + ".bias"):
            bias = torch.cat([self._read(f"{name}.bias", rows=shard) for name, shard in zip(names, shards, strict=True)])
        weights = [self._read(f"{name}.weight", rows=shard) for name, shard in zip(names, shards, strict=True)]
        return self._linear(torch.cat(weights) if len(weights) > 1 else weights[0], bias)

    def row_parallel(self, name: str) -> RowParallelLinear:
        columns = self.group.shard(self.checkpoint.shapes[f"{name}.weight"][1])
        bias = self._read(f"{name}.bias") if self.has(name + ".bias") else None
        weight = self._read(f"{name}.weight", columns=columns)
        return RowParallelLinear(self._linear(weight, bias if self.group.rank == 0 else None), self.group)

    def embedding_and_head(self, embedding: str, head: str | None) -> tuple[VocabParallelEmbedding, VocabParallelHead]:
        """head None: it is the embedding's table."""
        table = self._keep(self._vocabulary(embedding))
        if head is not None:
            linear = self._linear(self._vocabulary(head), None)
        elif self.numerics.packed:
            linear = self._linear(table, None)
        else:
            linear = make_linear(table, None, self.numerics)  # the same memory
        vocab_size = self.config.vocab_size
        return (
            VocabParallelEmbedding(table, vocab_size, self.numerics.activations, self.group),
            VocabParallelHead(linear, vocab_size, self.group),
        )

    def _vocabulary(self, name: str) -> torch.Tensor:
        """[shard_width, hidden]: rows padded with zeros, so that every rank has as many."""
        total = self.checkpoint.shapes[name][0]
        part = self._read(name, rows=self.group.shard(total))
        missing = self.group.shard_width(total) - part.shape[0]
        return torch.nn.functional.pad(part, (0, 0, 0, missing)) if missing else part

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        linear = make_linear(weight.to(self.device), None if bias is None else bias.to(self.device), self.numerics)
        self.num_bytes += linear.num_bytes
        return linear

    def _read(
        self, name: str, rows: slice | None = None, columns: slice | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        part = self.checkpoint.tensor(name, dtype or self.numerics.weights, rows=rows, columns=columns)
        self._num_read += 1
        self._progress(self._num_read / len(self._names))
        return part

    def _keep(self, part: torch.Tensor) -> torch.Tensor:
        self.num_bytes += part.nbytes
        return part.to(self.device)
