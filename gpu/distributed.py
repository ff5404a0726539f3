"""The tensor parallel group: what ranks that share every layer say to one another."""

from __future__ import annotations

import torch
import torch.distributed as dist


class TensorParallelGroup:
    """Rank `rank` of `size` ranks, over torch.distributed's default group; alone (size 1) every exchange is the identity."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}")
        self.rank = rank
        self.size = size

    def shard(self, total: int) -> slice:
        """This rank's part of `total` things, in order; where they do not divide evenly the last ranks have fewer."""
        width = self.shard_width(total)
        return slice(min(self.rank * width, total), min((self.rank + 1) * width, total))

    def shard_width(self, total: int) -> int:
        return -(-total // self.size)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x; may change x."""
        if self.size == 1:
            return x
        if x.device.type != "cpu":
            dist.all_reduce(x)
            return x
        # Gloo's ring adds each part of a tensor in another order of ranks, so that a row's sum would depend on where it stands
        # in the batch. Gathered and added in the order of ranks, it does not.
        parts = self._gather(x)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x, side by side in the last dimension, in the order of ranks. Shapes are equal on all ranks."""
        if self.size == 1:
            return x
        return torch.cat(list(self._gather(x)), dim=-1)

    def all_say(self, yes: bool) -> bool:
        """Whether all ranks say so."""
        return bool(self.all_gather(torch.tensor([yes])).all())

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]"""
        gathered = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        dist.all_gather(list(gathered), x.contiguous())
        return gathered


def init_group(rank: int, size: int, init_method: str, device: torch.device) -> TensorParallelGroup:
    """Joins the group of ranks on devices of one type; returns when all ranks have.

    `init_method` as torch.distributed's ("file:///path", "tcp://host:port").
    """
    if size > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"  # a model on the CPU of a machine with GPUs needs gloo
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size)
    return TensorParallelGroup(rank, size)
