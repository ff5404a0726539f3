"""A model's decoder layers on the CPU in compiled calls: where a step has few tokens, Python would take longer than arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpu.models.attention import AttentionMetadata
from gpu.models.decoder import DecoderLayer
from gpu.models.kv_cache import KVCache
from gpu.models.linear import Linear, PackedLinear
from kernels.cpu.layer import after_attention, before_attention
from kernels.cpu.step_attention import StepAttention


class CompiledLayers:
    """Compute what the layers that they were made of do, to the same bits."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        attention = layers[0].attention
        self._num_heads, self._num_kv_heads, self._head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        self._layers = [_Operands(layer) for layer in layers]

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
        out, rest = hidden.numpy(), residual.numpy()
        places, turns, slots = positions.numpy(), cos_sin.numpy(), step.slots.numpy()
        attend = StepAttention(step.arrays, self._num_heads, kv.arrays[0][0])
        for layer, (keys, values) in zip(self._layers, kv.arrays, strict=True):
            heads = np.empty((len(out), self._num_heads + 2 * self._num_kv_heads, self._head_dim), np.float32)
            before_attention(heads, out, rest, *layer.before, self._num_kv_heads, places, turns, keys, values, slots)
            step.wrote_layer()
            attended = attend(heads[:, : self._num_heads], keys, values, layer.scale, layer.window)
            after_attention(out, attended, rest, *layer.after)


class _Operands:
    """A layer's arguments for the compiled calls: a norm's weight and epsilon, then matrices; `kernels.cpu.layer` has the order."""

    def __init__(self, layer: DecoderLayer) -> None:
        attention, mlp = layer.attention, layer.mlp
        norms = (layer.input_norm, layer.post_attention_norm)
        before, after = ((norm.weight.numpy(), np.float32(norm.epsilon)) for norm in norms)
        self.before = (*before, *_operands(attention.qkv))
        self.after = (
            *after,
            *_operands(attention.output.linear),
            *_operands(mlp.gate_up),
            mlp.intermediate_size,
            *_operands(mlp.down.linear),
        )
        self.scale, self.window = attention.attend.scale, attention.attend.window


def _is_plain(layer: DecoderLayer) -> bool:
    attention, mlp = layer.attention, layer.mlp
    linears = (attention.qkv, attention.output.linear, mlp.gate_up, mlp.down.linear)
    compilable = all(isinstance(linear, PackedLinear) and linear.is_compilable for linear in linears)
    return compilable and attention.output.group.size == 1 and attention.query_norm is None


def _operands(linear: Linear) -> tuple[np.ndarray, np.ndarray]:
    """The arguments of `kernels.cpu.layer.project`."""
    assert isinstance(linear, PackedLinear)
    return linear.operands
