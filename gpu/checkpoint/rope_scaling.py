"""How a model stretches its rotary embedding, read from config.json or a GGUF file; gpu.models.rotary computes it. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpu.checkpoint.fields import FLAG, TEXT, Fields, integer, number
from gpu.errors import CheckpointError

THETA = number(1, 1e15, above=True)
FACTOR = number(0, 1e6, above=True)
POSITIONS = integer(1, 2**31 - 1)
ROPE_TYPES = ("linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float  # above low_freq_factor
    original_length: int  # tokens


@dataclass(frozen=True)
class YarnScaling:
    factor: float
    original_length: int  # tokens
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0  # factor on cosines and sines


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


def read_rope(config: Fields, max_positions: int) -> tuple[float, RopeScaling | None]:
    """Base frequency and scaling, out of `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4).

    "dynamic" changes nothing below the model's own length, beyond which headrace does not go: it is None, as no scaling is.
    """
    rope = config.inside("rope_parameters")
    if not rope.values:
        rope = config.inside("rope_scaling")
    for name, value in rope.values.items():
        if isinstance(value, dict):
            raise CheckpointError(f"{config.source}: {rope.path}{name} is of some layers alone, which is not supported")
    theta = rope.get("rope_theta", THETA) or config.get("rope_theta", THETA) or 10000.0
    if (rope.get("partial_rotary_factor", FACTOR) or config.get("partial_rotary_factor", FACTOR) or 1.0) != 1.0:
        raise CheckpointError(f"{config.source}: partial rotary embedding (partial_rotary_factor) is not supported")
    kind = rope.get("rope_type", TEXT) or rope.get("type", TEXT) or "default"
    if kind in ("default", "dynamic"):
        return theta, None
    if kind == "linear":
        return theta, LinearScaling(rope.need("factor", FACTOR))
    if kind == "llama3":
        return theta, _llama3(rope)
    if kind == "yarn":
        return theta, _yarn(rope, max_positions)
    known = ", ".join(ROPE_TYPES)
    raise CheckpointError(f"{config.source}: rotary embedding of type {kind!r} is not supported, only default, {known}")


def yarn_scaling(factor: float | None, original_length: int | None, max_positions: int) -> YarnScaling:
    """With the defaults of the paper. Without a factor, by how much the model is longer than `original_length`."""
    original_length = original_length or max_positions
    factor = factor or max_positions / original_length
    return YarnScaling(factor, original_length, magnitude=_magnitude(factor))


def _llama3(rope: Fields) -> Llama3Scaling:
    low, high = rope.need("low_freq_factor", FACTOR), rope.need("high_freq_factor", FACTOR)
    if high <= low:
        rope.wrong("high_freq_factor", f"above low_freq_factor, which is {low:g}")
    return Llama3Scaling(rope.need("factor", FACTOR), low, high, rope.need("original_max_position_embeddings", POSITIONS))


def _yarn(rope: Fields, max_positions: int) -> YarnScaling:
    original = rope.get("original_max_position_embeddings", POSITIONS)
    factor = rope.get("factor", FACTOR) if original else rope.need("factor", FACTOR)
    scaling = yarn_scaling(factor, original, max_positions)
    truncate = rope.get("truncate", FLAG)
    return YarnScaling(
        scaling.factor,
        scaling.original_length,
        beta_fast=rope.get("beta_fast", FACTOR) or scaling.beta_fast,
        beta_slow=rope.get("beta_slow", FACTOR) or scaling.beta_slow,
        truncate=scaling.truncate if truncate is None else truncate,
        magnitude=_given_magnitude(rope, scaling.factor) or scaling.magnitude,
    )


def _magnitude(factor: float, strength: float = 1.0) -> float:
    """The softmax temperature of the YaRN paper's section 3.4 (arXiv 2309.00071), as a factor on queries and on keys."""
    return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0


def _given_magnitude(rope: Fields, factor: float) -> float | None:
    """The magnitude that the file gives, directly or by DeepSeek's two parameters."""
    given = rope.get("attention_factor", FACTOR)
    if given is not None:
        return given
    strength, strength_all = rope.get("mscale", FACTOR), rope.get("mscale_all_dim", FACTOR)
    return _magnitude(factor, strength) / _magnitude(factor, strength_all) if strength and strength_all else None
