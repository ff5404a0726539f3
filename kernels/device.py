"""Which implementation of an operation serves a tensor: the one for CPUs, Triton's, or plain torch where there is no Triton."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from kernels import reference


def on_accelerator(x: torch.Tensor) -> bool:
    return x.device.type != "cpu"


@functools.cache
def accelerated(operation: str, function: str) -> Callable[..., Any]:
    """`function` of kernels/triton/<operation>.py (imported here alone), or its plain-torch twin where Triton is not installed."""
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        return getattr(reference, function)
    return getattr(importlib.import_module(f"kernels.triton.{operation}"), function)
