"""From a checkpoint to a rank's model, which computes hidden states and logits over the paged cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu.checkpoint.packed_weights import PrivateWeights, SharedWeights
from gpu.checkpoint.weights import Checkpoint
from gpu.distributed import TensorParallelGroup
from gpu.models.compiled_layers import CompiledLayers
from gpu.models.decoder import CausalLM
from gpu.models.shards import ShardReader
from gpu.numerics import Numerics


def load_model(
    checkpoint: Checkpoint,
    numerics: Numerics,
    device: torch.device,
    group: TensorParallelGroup,
    progress: Callable[[float], None] = lambda fraction: None,
    weights: PrivateWeights | SharedWeights | None = None,
) -> CausalLM:
    """This rank's shard of the model, its layers compiled where they can be.

    `progress` hears the fraction loaded, 0 to 1. `weights` keeps the packed matrices, by default in private memory. It is closed
    when all are loaded, abandoned where loading fails. Raises CheckpointError with the reason.
    """
    weights = weights or PrivateWeights()
    try:
        reader = ShardReader(checkpoint, numerics, device, group, progress, weights)
        model = CausalLM(reader)
        weights.close()
        reader.report()
    except BaseException:
        weights.abandon()
        raise
    if CompiledLayers.fit(model.layers):
        model.compiled = CompiledLayers(model.layers)
    return model
