"""One way in which a server launches an operation, told by example: what `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ALL_CHIPS = (80, 90, 100)


@dataclass(frozen=True)
class Variant:
    """`example(**arguments)` calls the launcher with tensors on torch's meta device, of the shapes, strides and dtypes of a real
    step; every kernel it launches is compiled as Triton would at that launch. The name tells variants of one operation apart."""

    name: str
    example: Callable[..., object]
    arguments: dict[str, Any] = field(default_factory=dict)
    chips: tuple[int, ...] = ALL_CHIPS  # compute capabilities that it is for
    matrix: tuple[str, ...] = ()  # names of its kernels that must use matrix instructions
