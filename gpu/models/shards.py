"""Reads a rank's shard of a checkpoint onto its device, keeping count of bytes and progress."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu.distributed import TensorParallelGroup
from gpu.weights import Checkpoint


class ShardReader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorParallelGroup,
        progress: Callable[[float], None],
    ) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.dtype = dtype
        self.device = device
        self.group = group
        self.num_bytes = 0
        self._progress = progress
        self._names = frozenset(checkpoint.names())
        self._num_read = 0

    def has(self, name: str) -> bool:
        return name in self._names

    def whole(self, name: str) -> torch.Tensor:
        return self._keep(self._read(name))

    def rows(self, *names: str) -> torch.Tensor:
        """This rank's rows of each tensor, one tensor below the other."""
        parts = [self._read(name, rows=self.group.shard(self.checkpoint.shapes[name][0])) for name in names]
        return self._keep(torch.cat(parts) if len(parts) > 1 else parts[0])

    def columns(self, name: str) -> torch.Tensor:
        return self._keep(self._read(name, columns=self.group.shard(self.checkpoint.shapes[name][1])))

    def vocabulary(self, name: str) -> torch.Tensor:
        """[shard_width, hidden]: rows padded with zeros, so that every rank has as many."""
        total = self.checkpoint.shapes[name][0]
        part = self._read(name, rows=self.group.shard(total))
        missing = self.group.shard_width(total) - part.shape[0]
        return self._keep(torch.nn.functional.pad(part, (0, 0, 0, missing)) if missing else part)

    def _read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        part = self.checkpoint.tensor(name, self.dtype, rows=rows, columns=columns)
        self._num_read += 1
        self._progress(self._num_read / len(self._names))
        return part

    def _keep(self, part: torch.Tensor) -> torch.Tensor:
        self.num_bytes += part.nbytes
        return part.to(self.device)
