"""Angles of the rotary embedding for every position, with the scalings that stretch a model's context.

Formulas as in the papers and in transformers' `modeling_rope_utils`: linear (position interpolation, arXiv 2306.15595), llama3
(Llama 3.1's model card), yarn (Peng et al. 2023, arXiv 2309.00071).
"""

from __future__ import annotations

import math

import torch

from gpu.checkpoint.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling


class RotaryEmbedding:
    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> None:
        self.inverse_frequencies = _frequencies(head_dim, theta, scaling)
        self.magnitude = scaling.magnitude if isinstance(scaling, YarnScaling) else 1.0  # on cosines and sines
        self.device = device
        self.cos_sin = torch.empty(0, head_dim, device=device)  # [num_positions, head_dim] as kernels.rope wants it

    def ensure(self, num_positions: int) -> None:
        """Grows the table to `num_positions` where it is shorter."""
        if self.cos_sin.shape[0] < num_positions:
            # float32 throughout, as transformers: other roundings of a large angle would show in the last digits
            angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * self.inverse_frequencies
            table = torch.cat((angles.cos(), angles.sin()), dim=1) * self.magnitude
            self.cos_sin = table.to(self.device)


def _frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """[head_dim / 2] float32, radians a position."""
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if isinstance(scaling, LinearScaling):
        return inverse / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3(inverse, scaling)
    if isinstance(scaling, YarnScaling):
        return _yarn(inverse, head_dim, theta, scaling)
    return inverse


def _llama3(inverse: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """High frequencies stay, low ones are divided by the factor, those between are interpolated."""
    factor, low, high = scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor
    old_length = scaling.original_length
    wavelength = 2 * math.pi / inverse
    smooth = (old_length / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > old_length / low, inverse / factor, inverse)
    return torch.where((wavelength <= old_length / low) & (wavelength >= old_length / high), between, scaled)


def _yarn(inverse: torch.Tensor, head_dim: int, theta: float, scaling: YarnScaling) -> torch.Tensor:
    def dimension(rotations: float) -> float:
        """The dimension whose angle makes so many turns over the old length."""
        return head_dim * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (max(high - low, 0.001))).clamp(0, 1)
    return inverse / scaling.factor * ramp + inverse * (1 - ramp)
