"""The memory of keys and values: fixed blocks of tokens, of which requests hold lists."""

from __future__ import annotations

import functools

import numpy as np
import torch

from kernels.cpu.math import elements

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector of a CPU


class KVCache:
    """A key and a value tensor a layer; shapes as in `kernels.attention`. Block 0 is never any request's.

    In memory a CPU's keys lie as their shape says: 16 tokens of one dimension are a vector. A GPU's lie with head_dim innermost, as
    the values do, in the same shape by their strides: a thread copies 16 bytes of one token towards the matrix units.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        shared: bool = False,
    ) -> None:
        """shared: all layers use the same memory: for a profiling forward, whose results are not used."""
        transposed = (num_blocks, num_kv_heads, head_dim, block_size)
        shape = (num_blocks, num_kv_heads, block_size, head_dim)

        def keys() -> torch.Tensor:
            return _zeros(transposed, dtype, device) if device.type == "cpu" else _zeros(shape, dtype, device).transpose(2, 3)

        layers = [(keys(), _zeros(shape, dtype, device)) for _ in range(1 if shared else num_layers)]
        self.layers = layers * num_layers if shared else layers

    @functools.cached_property
    def arrays(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """`layers` as the CPU's compiled loops take them."""
        return [(elements(keys), elements(values)) for keys, values in self.layers]

    @functools.cached_property
    def addresses(self) -> np.ndarray:
        """[layers, 2] int64, of each layer's keys and values in this process's memory."""
        return np.array([[keys.ctypes.data, values.ctypes.data] for keys, values in self.arrays], np.int64)

    @staticmethod
    def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes in all layers together."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are pages that the kernel maps when they are first written: memory is used as blocks are, and the start does
    # not wait for gigabytes to be cleared, as torch.zeros would.
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[offset : offset + num_bytes]).view(dtype).view(shape)
