"""Makes layers of a rank's shard of a checkpoint on its device, keeping count of bytes and progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpu.checkpoint.packed_matrix import PackedMatrix
from gpu.checkpoint.packed_weights import PrivateWeights, SharedWeights
from gpu.checkpoint.weights import Checkpoint
from gpu.distributed import TensorParallelGroup
from gpu.errors import CheckpointError
from gpu.models.layers import RowParallelLinear, VocabParallelEmbedding, VocabParallelHead
from gpu.models.linear import Linear, open_linear, pack
from gpu.numerics import Numerics
from kernels.cpu.quantized_blocks import INT8_BLOCK, join_rows, zeros_like

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TensorSlice:
    """Rows and columns of a tensor of the checkpoint."""

    name: str
    rows: slice | None = None
    columns: slice | None = None


class ShardReader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        numerics: Numerics,
        device: torch.device,
        group: TensorParallelGroup,
        progress: Callable[[float], None],
        weights: PrivateWeights | SharedWeights,
    ) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.numerics = numerics
        self.device = device
        self.group = group
        self.num_bytes = 0
        self._progress = progress
        self._weights = weights
        self._names = frozenset(checkpoint.names())
        self._num_made = 0
        self._without_blocks: list[str] = []  # matrices that the file does not quantize in blocks that a kernel multiplies

    def has(self, name: str) -> bool:
        return name in self._names

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight, whole on every rank."""
        part = self.checkpoint.tensor(name, self.numerics.activations)
        self.num_bytes += part.nbytes
        self._made(1)
        return part.to(self.device)

    def column_parallel(self, *names: str) -> Linear:
        """This rank's outputs of each of the layers `names`, the first's before the second's."""
        shards = [self.group.shard(self.checkpoint.shapes[f"{name}.weight"][0]) for name in names]
        bias = None
        if self.has(names[0] + ".bias"):
            bias = torch.cat([self._bias(f"{name}.bias", shard) for name, shard in zip(names, shards, strict=True)])
        return self._linear([TensorSlice(f"{name}.weight", rows=shard) for name, shard in zip(names, shards, strict=True)], bias)

    def check_row_parallel(self, num_features: int) -> None:
        """Raises CheckpointError where int8's blocks would not lie whole on one rank each: other blocks, of weights and of
        activations, have other scales, so that what is computed would depend on the number of ranks."""
        width = self.group.shard_width(num_features)
        if self.numerics.quantization == "int8" and self.group.size > 1 and width % INT8_BLOCK:
            raise CheckpointError(
                f"tensor parallel size {self.group.size} divides {num_features} columns of a matrix into parts of {width}, which "
                f"cuts through int8's blocks of {INT8_BLOCK}; use another size or --quantization none"
            )

    def row_parallel(self, name: str) -> RowParallelLinear:
        columns = self.group.shard(self.checkpoint.shapes[f"{name}.weight"][1])
        bias = self._bias(f"{name}.bias") if self.has(name + ".bias") else None
        return RowParallelLinear(
            self._linear([TensorSlice(f"{name}.weight", columns=columns)], bias if self.group.rank == 0 else None), self.group
        )

    def embedding_and_head(self, embedding: str, head: str | None) -> tuple[VocabParallelEmbedding, VocabParallelHead]:
        """head None: it is the embedding's table, in the same memory."""
        table = self._vocabulary(embedding)
        linear = table if head is None else self._vocabulary(head)
        vocab_size = self.config.vocab_size
        return VocabParallelEmbedding(table, vocab_size, self.group), VocabParallelHead(linear, vocab_size, self.group)

    def _vocabulary(self, name: str) -> Linear:
        total = self.checkpoint.shapes[name][0]
        return self._linear([TensorSlice(name, rows=self.group.shard(total))], None, self.group.shard_width(total))

    def _linear(self, slices: Sequence[TensorSlice], bias: torch.Tensor | None, out_features: int = 0) -> Linear:
        """The rows of all slices, and rows of zeros up to `out_features`, so that every rank has as many."""
        packed = self._weights.matrix(slices[0].name, lambda: self._pack(slices, out_features))
        linear = open_linear(packed, None if bias is None else bias.to(self.device), self.numerics, self.device)
        self.num_bytes += linear.num_bytes
        self._made(len(slices))
        return linear

    def _pack(self, slices: Sequence[TensorSlice], out_features: int) -> PackedMatrix:
        if self.numerics.quantization == "gguf":
            found = [self.checkpoint.blocks(each.name, each.rows, each.columns) for each in slices]
            blocks = [matrix for matrix in found if matrix is not None]
            if len(blocks) == len(slices):
                missing = out_features - sum(len(matrix.codes) for matrix in blocks)
                if missing > 0:
                    blocks.append(zeros_like(blocks[-1], missing))
                return PackedMatrix.blocks(join_rows(blocks), blocks[0].codes.shape[1])
            self._without_blocks += [each.name for each in slices]
        tensors = [self.checkpoint.tensor(each.name, self.numerics.weights, each.rows, each.columns) for each in slices]
        weight = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        if len(weight) < out_features:
            weight = torch.nn.functional.pad(weight, (0, 0, 0, out_features - len(weight)))
        return pack(weight, self.numerics)

    def report(self) -> None:
        """Once all layers are made: which matrices are not of the class that was asked for."""
        if self._without_blocks:
            count, first, kept = len(self._without_blocks), self._without_blocks[0], self.numerics.weights
            logger.warning("%d matrices (%s, ...) are kept as %s: the file has no blocks of them to multiply", count, first, kept)

    def _bias(self, name: str, rows: slice | None = None) -> torch.Tensor:
        self._made(1)
        return self.checkpoint.tensor(name, self.numerics.activations, rows=rows)

    def _made(self, count: int) -> None:
        self._num_made += count
        self._progress(self._num_made / len(self._names))
