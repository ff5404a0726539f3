"""Angles of the rotary embedding for every position, with the scalings that stretch a model's context.

Formulas as in the papers and in transformers' `modeling_rope_utils`: linear (position interpolation, arXiv 2306.15595), llama3
(Llama 3.1's model card), yarn (Peng et al. 2023, arXiv 2309.00071). "dynamic" changes nothing below the model's own length, beyond
which headrace does not go.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from gpu.errors import CheckpointError


class RotaryEmbedding:
    def __init__(
        self, head_dim: int, theta: float, scaling: dict[str, Any] | None, max_position_embeddings: int, device: torch.device
    ) -> None:
        self.inverse_frequencies, self.magnitude = _frequencies(head_dim, theta, scaling or {}, max_position_embeddings)
        self.device = device
        self.cos_sin = torch.empty(0, head_dim, device=device)  # [num_positions, head_dim] as kernels.rope wants it

    def ensure(self, num_positions: int) -> None:
        """Grows the table to `num_positions` where it is shorter."""
        if self.cos_sin.shape[0] < num_positions:
            # float32 throughout, as transformers: other roundings of a large angle would show in the last digits
            angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * self.inverse_frequencies
            table = torch.cat((angles.cos(), angles.sin()), dim=1) * self.magnitude
            self.cos_sin = table.to(self.device)


def _frequencies(head_dim: int, theta: float, scaling: dict[str, Any], max_positions: int) -> tuple[torch.Tensor, float]:
    """([head_dim / 2] float32 radians a position, factor on cosines and sines)."""
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    kind = scaling.get("rope_type", "default")
    if kind in ("default", "dynamic"):
        return inverse, 1.0
    if kind == "linear":
        return inverse / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(inverse, scaling), 1.0
    if kind == "yarn":
        return _yarn(inverse, head_dim, theta, scaling, max_positions)
    raise CheckpointError(f"rotary embedding of type {kind!r} is not supported")


def _llama3(inverse: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """High frequencies stay, low ones are divided by the factor, those between are interpolated."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    old_length = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    smooth = (old_length / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > old_length / low, inverse / factor, inverse)
    return torch.where((wavelength <= old_length / low) & (wavelength >= old_length / high), between, scaled)


def _yarn(
    inverse: torch.Tensor, head_dim: int, theta: float, scaling: dict[str, Any], max_positions: int
) -> tuple[torch.Tensor, float]:
    old_length = scaling.get("original_max_position_embeddings") or max_positions
    factor = scaling.get("factor") or max_positions / old_length

    def dimension(rotations: float) -> float:
        """The dimension whose angle makes so many turns over the old length."""
        return head_dim * math.log(old_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (max(high - low, 0.001))).clamp(0, 1)
    frequencies = inverse / factor * ramp + inverse * (1 - ramp)
    return frequencies, _yarn_magnitude(factor, scaling)


def _yarn_magnitude(factor: float, scaling: dict[str, Any]) -> float:
    """The softmax temperature of the paper's section 3.4, as a factor on queries and keys; with DeepSeek's two-parameter form."""

    def magnitude(strength: float) -> float:
        return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    strength, strength_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if strength and strength_all:
        return magnitude(strength) / magnitude(strength_all)
    return magnitude(1.0)
