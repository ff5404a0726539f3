"""A decoder's layers on the CPU in one compiled call: in a step of few tokens, Python would take longer than arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gpu.models.attention import AttentionMetadata
from gpu.models.decoder import DecoderLayer
from gpu.models.kv_cache import KVCache
from gpu.models.linear import Linear, PackedLinear
from kernels.cpu import crew
from kernels.cpu.layer import run_layers
from kernels.cpu.step_attention import attention_task, tile_tokens


class CompiledLayers:
    """Compute what the layers that they were made of do, to the same bits."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self._layers = layers  # whose memory is described
        self._num_heads = layers[0].attention.num_heads
        norms = [(layer.input_norm, layer.post_attention_norm) for layer in layers]
        attends = [layer.attention.attend for layer in layers]
        self._operands = (
            np.stack([[norm.weight.numpy() for norm in pair] for pair in norms]),
            np.array([[norm.epsilon for norm in pair] for pair in norms], np.float32),
            np.stack([[_description(linear) for linear in _linears(layer)] for layer in layers]),
            np.array([layer.mlp.intermediate_size for layer in layers]),
            np.array([attend.scale for attend in attends], np.float32),
            np.array([attend.window for attend in attends]),
        )

    @classmethod
    def fit(cls, layers: Sequence[DecoderLayer]) -> bool:
        """Whether the layers are made of nothing else than what is compiled here."""
        return all(map(_is_plain, layers))

    def __call__(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: KVCache,
        step: AttentionMetadata,
    ) -> None:
        """As `DecoderLayer`, one after the other; `hidden` becomes the last one's output."""
        keys, values = kv.arrays[0]
        arrays = (positions.numpy(), cos_sin.numpy(), step.slots.numpy(), step.arrays)
        numbers = (self._num_heads, tile_tokens(self._num_heads, keys), attention_task(keys))
        state = (hidden.numpy(), residual.numpy())
        run_layers(*state, *self._operands, kv.addresses, keys, values, *arrays, *numbers, crew.board(), *step.paces)


def _is_plain(layer: DecoderLayer) -> bool:
    attention = layer.attention
    compilable = all(isinstance(linear, PackedLinear) and linear.is_compilable for linear in _linears(layer))
    return compilable and attention.output.group.size == 1 and attention.query_norm is None


def _linears(layer: DecoderLayer) -> tuple[Linear, ...]:
    attention, mlp = layer.attention, layer.mlp
    return (attention.qkv, attention.output.linear, mlp.gate_up, mlp.down.linear)


def _description(linear: Linear) -> NDArray[np.int64]:
    assert isinstance(linear, PackedLinear)
    return linear.description
