"""A model's decoder layers on the CPU in compiled calls: where a step has few tokens, Python would take longer than arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

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
        self._num_heads = layers[0].attention.num_heads
        operands = [_operands(layer) for layer in layers]
        # A call takes layers whose operands are of the same types: mostly all of them.
        self._runs = [tuple(run) for _, run in groupby(operands, _types)]

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
        arrays = (positions.numpy(), cos_sin.numpy(), step.slots.numpy(), step.arrays)
        keys, _ = kv.arrays[0]
        numbers = (self._num_heads, tile_tokens(self._num_heads, keys), attention_task(keys))
        first = 0
        for run in self._runs:
            caches = tuple(kv.arrays[first : first + len(run)])
            run_layers(hidden.numpy(), residual.numpy(), run, caches, *arrays, *numbers, crew.board(), first, *step.paces)
            first += len(run)


def _is_plain(layer: DecoderLayer) -> bool:
    attention, mlp = layer.attention, layer.mlp
    linears = (attention.qkv, attention.output.linear, mlp.gate_up, mlp.down.linear)
    compilable = all(isinstance(linear, PackedLinear) and linear.is_compilable for linear in linears)
    return compilable and attention.output.group.size == 1 and attention.query_norm is None


def _operands(layer: DecoderLayer) -> tuple[tuple[Any, ...], ...]:
    """What `run_layers` takes of a layer."""
    attention, mlp = layer.attention, layer.mlp
    first, second = ((norm.weight.numpy(), np.float32(norm.epsilon)) for norm in (layer.input_norm, layer.post_attention_norm))
    return (
        (*first, *_packed(attention.qkv)),
        (*second, *_packed(attention.output.linear)),
        (*_packed(mlp.gate_up), mlp.intermediate_size, *_packed(mlp.down.linear)),
        (np.float32(attention.attend.scale), attention.attend.window),
    )


def _packed(linear: Linear) -> tuple[Any, ...]:
    assert isinstance(linear, PackedLinear)
    return linear.operands


def _types(operands: tuple[tuple[Any, ...], ...]) -> list[tuple[str, int]]:
    """Equal where compiled code is the same."""
    return [(x.dtype.name, x.ndim) for part in operands for x in part if isinstance(x, np.ndarray)]
