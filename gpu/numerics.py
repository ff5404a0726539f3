"""Numeric classes: the types to which a model's weights and activations are rounded.

Engines of one class compute the same values, with different kernels too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu.errors import UnsupportedConfiguration
from kernels.cpu import pairs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Numerics:
    """A numeric class. Matrices are `weights`, unless quantized; what flows between layers is `activations`."""

    weights: torch.dtype
    activations: torch.dtype
    quantization: str = "none"

    @classmethod
    def choose(cls, dtype: str, quantization: str, device: torch.device, has_blocks: bool = False) -> Numerics:
        """The class for --dtype and --quantization. `has_blocks`: the checkpoint has quantized blocks, whole on every rank.

        Raises UnsupportedConfiguration for what `device` does not compute.
        """
        on_cpu = device.type == "cpu"
        if quantization == "auto":
            quantization = "gguf" if on_cpu and has_blocks and dtype == "auto" else "none"
        if quantization != "none" and not on_cpu:
            raise UnsupportedConfiguration(f"--quantization {quantization} is for the CPU; this engine runs on {device.type}")
        if dtype == "auto":
            fast = not on_cpu or (quantization == "none" and pairs.is_fast())
            dtype = "bfloat16" if fast else "float16"
        weights = DTYPES[dtype]
        return cls(weights, torch.float32 if on_cpu else weights, quantization)  # CPUs convert as they load, and sum in float32

    @property
    def packed(self) -> bool:
        """Matrices are kept in a kernel's own layout."""
        return self.quantization != "none" or self.weights is not self.activations

    def __str__(self) -> str:
        name = str(self.weights).removeprefix("torch.")
        return name if self.quantization == "none" else f"{self.quantization}-{name}"
