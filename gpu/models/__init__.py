"""Models: from a checkpoint to something that computes hidden states and logits over the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gpu.checkpoint.packed_weights import PrivateWeights, SharedWeights
    from gpu.checkpoint.weights import Checkpoint
    from gpu.distributed import TensorParallelGroup
    from gpu.models.decoder import CausalLM
    from gpu.models.linear import Numerics


def load_model(
    checkpoint: Checkpoint,
    numerics: Numerics,
    device: torch.device,
    group: TensorParallelGroup,
    progress: Callable[[float], None] = lambda fraction: None,
    weights: PrivateWeights | SharedWeights | None = None,
) -> CausalLM:
    """This rank's shard of the model. `progress` hears the fraction loaded, 0 to 1; `weights` keeps
    the packed matrices, by default in private memory; it is closed, or abandoned where loading fails. Raises CheckpointError with
    the reason."""
    from gpu.checkpoint.packed_weights import PrivateWeights
    from gpu.models.decoder import CausalLM
    from gpu.models.shards import ShardReader

    weights = weights or PrivateWeights()
    try:
        reader = ShardReader(checkpoint, numerics, device, group, progress, weights)
        model = CausalLM(reader)
        weights.close()
        reader.report()
    except BaseException:
        weights.abandon()
        raise
    return model
