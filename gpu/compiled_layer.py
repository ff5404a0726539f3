"""A decoder layer on the CPU in compiled calls: where a step has few tokens, Python would take longer than arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from gpu.attention import AttentionMetadata
from gpu.linear import Linear, PackedLinear
from kernels import cpu_threads
from kernels.attention import attend_arrays, elements
from kernels.cpu_layer import after_attention, before_attention

if TYPE_CHECKING:
    from gpu.models.decoder import DecoderLayer


class CompiledLayer:
    """Computes what the layer that it was made of does, to the same bits."""

    def __init__(self, layer: DecoderLayer) -> None:
        attention, mlp = layer.attention, layer.mlp
        self._layer = layer
        self._num_heads, self._num_kv_heads, self._head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        self._qkv, self._output = _operands(attention.qkv), _operands(attention.output.linear)
        self._gate_up, self._down = _operands(mlp.gate_up), _operands(mlp.down.linear)
        self._intermediate = mlp.intermediate_size
        self._norm = (layer.input_norm.weight.numpy(), np.float32(layer.input_norm.epsilon))
        self._post_norm = (layer.post_attention_norm.weight.numpy(), np.float32(layer.post_attention_norm.epsilon))
        self._scale, self._window = attention.attend.scale, attention.attend.window

    @classmethod
    def fits(cls, layer: DecoderLayer) -> bool:
        """Whether the layer is made of nothing else than what is compiled here."""
        attention, mlp = layer.attention, layer.mlp
        linears = (attention.qkv, attention.output.linear, mlp.gate_up, mlp.down.linear)
        plain = all(isinstance(linear, PackedLinear) and linear.is_compilable for linear in linears)
        return plain and attention.output.group.size == 1 and attention.query_norm is None

    def __call__(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        step: AttentionMetadata,
    ) -> torch.Tensor:
        if cpu_threads.num_threads() > 1:  # which take parts of each operation
            return self._layer(hidden, residual, positions, cos_sin, cache, step)
        out, rest = hidden.numpy(), residual.numpy()
        keys, values = elements(cache[0]), elements(cache[1])
        heads = np.empty((len(out), self._num_heads + 2 * self._num_kv_heads, self._head_dim), np.float32)
        before_attention(
            heads, out, rest, *self._norm, *self._qkv, self._num_kv_heads, positions.numpy(), cos_sin.numpy(), keys, values,
            step.slots.numpy(),
        )  # fmt: skip
        step.wrote_layer()
        query = heads[:, : self._num_heads]
        attended = attend_arrays(query, keys, values, step.arrays, self._scale, self._window)
        after_attention(out, attended, rest, *self._post_norm, *self._output, *self._gate_up, self._intermediate, *self._down)
        return hidden


def _operands(linear: Linear) -> tuple[np.ndarray, np.ndarray, int]:
    """What `kernels.cpu_layer.project` takes."""
    assert isinstance(linear, PackedLinear)
    return linear.operands
