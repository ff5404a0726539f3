"""Which GPU a kernel is launched on, for launchers whose tiles depend on it."""

from __future__ import annotations

from contextvars import ContextVar

import torch

ahead_of_time: ContextVar[int] = ContextVar("ahead_of_time")  # set by kernels.aot, whose tensors are on no device


def capability(x: torch.Tensor) -> int:
    """Compute capability as in sm_XY: 80 for A100, 90 for H100 and H200, 100 for B200; 80 for a tensor on no GPU."""
    if x.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(x.device)
        return 10 * major + minor
    return ahead_of_time.get(80)
